"""On a GPU packed sequences go through FlashAttention's kernel for sequences of unequal lengths."""

import pytest
import torch
from tests.models.batches import gradients, make_batch, relative_norm
from tests.models.tiny import tiny_model

from lightrft.models import Actor, attention

pytestmark = pytest.mark.gpu

LENGTHS = (190, 5, 333, 1, 120)


def make_actor(dtype, *, sliding_window=None):
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05}
    model = tiny_model(
        "mistral", max_position_embeddings=512, sliding_window=sliding_window, **sizes
    )
    return Actor(model.to("cuda", dtype))


def results(actor):
    token_ids, attention_mask, scored_mask, upstream = (x.cuda() for x in make_batch(LENGTHS))
    actor.zero_grad()
    logprobs = actor(token_ids, attention_mask, scored_mask=scored_mask).logprobs
    (logprobs * upstream).sum().backward()
    return logprobs.detach(), {n: g.float() for n, g in gradients(actor).items()}


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of the kernel for unequal lengths."""
    found = []
    # Private: the numbers do not say which kernel ran.
    kernel = attention.attend_stream
    monkeypatch.setattr(
        attention, "attend_stream", lambda *args: (found.append(1), kernel(*args))[1]
    )
    return found


@pytest.mark.parametrize("window", [None, 17], ids=["full", "sliding"])
def test_packed_is_as_near_to_float32_as_padded(window, calls):
    exact, exact_gradients = results(make_actor(torch.float32, sliding_window=window))
    actor = make_actor(torch.bfloat16, sliding_window=window)
    padded, padded_gradients = results(actor)
    assert not calls
    actor.pack_samples()
    packed, packed_gradients = results(actor)
    assert len(calls) == 2  # layers
    assert (packed - exact).abs().mean() <= 1.5 * (padded - exact).abs().mean()
    limit = 1.5 * relative_norm(padded_gradients, exact_gradients)
    assert relative_norm(packed_gradients, exact_gradients) <= limit
    assert limit < 0.1


def test_packed_equals_padded_in_float32(calls):
    actor = make_actor(torch.float32)
    padded, padded_gradients = results(actor)
    actor.pack_samples()
    packed, packed_gradients = results(actor)
    assert not calls  # the kernel takes no float32
    assert (packed - padded).abs().max() <= 2e-5
    assert relative_norm(packed_gradients, padded_gradients) <= 2e-6
