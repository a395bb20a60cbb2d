"""Right-padded rows need no mask: causality keeps tokens from the padding behind them."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from tests.models.batches import forget_window, gradients, make_batch, relative_norm, sliding_model
from torch.overrides import TorchFunctionMode

from lightrft.models import Actor, Critic, TokenLayout
from lightrft.models.layout import LayoutPolicy


class SeenMasks(TorchFunctionMode):
    """Writes down the masks that torch's attention gets."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.masks.append((kwargs or {}).get("attn_mask"))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Masked(LayoutPolicy):
    """The same rows with a mask of all pairs of positions."""

    def lay_out(self, token_ids, attention_mask, scored_mask=None, **options):
        layout = TokenLayout.padded(token_ids, attention_mask, scored_mask)
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return replace(layout, is_right_padded=False, position_ids=positions)


def results(model):
    token_ids, attention_mask, _, upstream = make_batch()
    model.zero_grad()
    with SeenMasks() as seen:
        output = model(token_ids, attention_mask)
        values = output.logprobs if isinstance(model, Actor) else output
        (values * upstream).sum().backward()
    return values.detach(), gradients(model), seen.masks


@pytest.mark.parametrize("kind", [Actor, Critic])
def test_rows_without_a_mask_give_what_rows_with_one_give(checkpoint, kind):
    torch.manual_seed(1)
    model = kind.from_pretrained(checkpoint)
    if kind is Critic:
        torch.nn.init.normal_(model.value_head.weight)
    values, unmasked, masks = results(model)
    assert masks
    assert all(mask is None for mask in masks)
    model.layout_policy = Masked()
    wanted, masked, masks = results(model)
    assert all(mask is not None for mask in masks)
    assert torch.allclose(values, wanted, rtol=0, atol=1e-5)
    assert relative_norm(unmasked, masked) <= 1e-6


def test_left_padded_rows_keep_their_mask(checkpoint):
    actor = Actor.from_pretrained(checkpoint)
    token_ids, attention_mask, *_ = make_batch()
    wanted = actor(token_ids, attention_mask).logprobs
    flipped = torch.zeros_like(token_ids)
    is_real = attention_mask.flip(1)
    flipped[is_real] = token_ids[attention_mask]
    with SeenMasks() as seen:
        found = actor(flipped, is_real).logprobs
    assert all(mask is not None for mask in seen.masks)
    assert torch.allclose(found[is_real], wanted[attention_mask], rtol=0, atol=1e-5)


def test_a_model_that_says_it_is_not_causal_keeps_its_mask(checkpoint):
    actor = Actor.from_pretrained(checkpoint)
    actor.model.config.is_causal = False
    token_ids, attention_mask, *_ = make_batch()
    with SeenMasks() as seen:
        actor(token_ids, attention_mask)
    assert all(mask is not None for mask in seen.masks)


def test_a_sliding_window_is_kept():
    actor = Actor(sliding_model())
    values, unmasked, _ = results(actor)
    actor.layout_policy = Masked()
    wanted, masked, _ = results(actor)
    assert torch.allclose(values, wanted, rtol=0, atol=1e-5)
    assert relative_norm(unmasked, masked) <= 1e-6
    forget_window(actor.model)
    assert (results(actor)[0] - wanted).abs().max() > 0.01
