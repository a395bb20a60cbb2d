"""Attention of short rows in half precision: its values and gradients."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from lightrft.models import attention as module
from lightrft.models.attention import MAX_SHORT_TOKENS, SHORT, short_attention
from lightrft.models.loading import load_causal_lm
from lightrft.tools.model_presets import write_tiny_model


class Layer(nn.Module):
    num_key_value_groups = 3
    is_causal = True


def draw(rows, tokens, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 6, tokens, 16), (rows, 2, tokens, 16), (rows, 2, tokens, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def visible(rows, tokens):
    """Causal, with as many padding tokens at the left as the row's number."""
    index = torch.arange(tokens)
    begins = torch.arange(rows)[:, None, None]
    mask = (index[:, None] >= index[None, :]) & (index[None, :] >= begins)
    return (mask | torch.eye(tokens, dtype=torch.bool))[:, None]


def plain(query, key, value, mask):
    """[rows, tokens, heads, head_dim] in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(3, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 7, 33, MAX_SHORT_TOKENS, MAX_SHORT_TOKENS + 1])
def test_values_and_gradients_are_those_of_plain_attention(tokens):
    rows, mask = 3, visible(3, tokens)
    given = draw(rows, tokens, tokens, torch.bfloat16)
    found, weights = short_attention(Layer(), *given, mask)
    wanted = plain(*given, mask)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    assert weights is None
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    found_grads = torch.autograd.grad(found, given, upstream.to(found.dtype))
    wanted_grads = torch.autograd.grad(wanted, given, upstream.double())
    for got, expected in zip(found_grads, wanted_grads, strict=True):
        distance = (got.double() - expected.double()).norm()
        assert distance <= 2e-2 * expected.double().norm() + 1e-6


@pytest.mark.parametrize(
    "tokens, dtype, is_product",
    [
        (MAX_SHORT_TOKENS, torch.bfloat16, True),
        (MAX_SHORT_TOKENS + 1, torch.bfloat16, False),
        (9, torch.float32, False),
    ],
)
def test_only_short_rows_in_half_precision_are_computed_by_products(
    monkeypatch, tokens, dtype, is_product
):
    asked = []
    choose = module.sdpa_kernel
    monkeypatch.setattr(module, "sdpa_kernel", lambda kind: asked.append(kind) or choose(kind))
    short_attention(Layer(), *draw(1, tokens, 0, dtype), None)
    assert asked == [SDPBackend.MATH] * is_product


def test_a_loaded_model_attends_so(tmp_path):
    write_tiny_model(tmp_path, "tiny-qwen3", seed=0)
    model = load_causal_lm(path=str(tmp_path), dtype="float32")
    assert model.config._attn_implementation == SHORT
