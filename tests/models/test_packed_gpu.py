"""On a GPU packed sequences go through FlashAttention's kernel for sequences of unequal lengths."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from lightrft.models import Actor, attention

pytestmark = pytest.mark.gpu

LENGTHS = (190, 5, 333, 1, 120)


def make_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)[:, None]
    width = int(lengths.max())
    token_ids = torch.randint(0, 256, (len(LENGTHS), width), generator=generator)
    attention_mask = torch.arange(width) < lengths
    scored_mask = attention_mask & (torch.arange(width) >= 1 + lengths // 3)
    upstream = torch.randn(len(LENGTHS), width, generator=generator)
    return [t.cuda() for t in (token_ids, attention_mask, scored_mask, upstream)]


def make_actor(dtype, *, sliding_window=None):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=256,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=384,
        initializer_range=0.05,
        sliding_window=sliding_window,
    )
    return Actor(MistralForCausalLM(config).to("cuda", dtype))


def results(actor):
    token_ids, attention_mask, scored_mask, upstream = make_batch()
    actor.zero_grad()
    logprobs = actor(token_ids, attention_mask, scored_mask=scored_mask).logprobs
    (logprobs * upstream).sum().backward()
    gradients = {name: p.grad.float().clone() for name, p in actor.named_parameters()}
    return logprobs.detach(), gradients


def relative_norm(found, expected):
    difference = sum(float((found[n] - expected[n]).double().square().sum()) for n in expected)
    return (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5


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


def test_no_sequence_sees_another_on_a_gpu(calls):
    token_ids, attention_mask, scored_mask, _ = make_batch()
    actor = make_actor(torch.bfloat16)
    actor.pack_samples()
    before = actor(token_ids, attention_mask, scored_mask=scored_mask).logprobs
    changed = token_ids.clone()
    changed[2] = (changed[2] + 1) % 256
    after = actor(changed, attention_mask, scored_mask=scored_mask).logprobs
    others = [0, 1, 3, 4]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[2], before[2])
    assert len(calls) == 4
