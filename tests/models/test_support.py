"""The kept mass of a truncated law, found again from the trainer's own logits."""

import itertools
import math

import pytest
import torch
from tests.engines.test_sampling import slow_law
from tests.models.batches import plain_and_fused

from lightrft.engines.types import SamplingParams
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models import Actor
from lightrft.models.support import SamplingSupport, log_kept_mass, replay_support
from lightrft.models.types import Replayed

SUPPORTS = [
    SamplingSupport(top_k, top_p, min_p)
    for top_k, top_p, min_p in itertools.product((-1, 1, 7), (1.0, 0.6), (0.0, 0.2))
]
VOCAB = 40


def slow_log_mass(logits, target, support):
    """One row in float64 by the law that its tokens are drawn from."""
    params = SamplingParams(top_k=support.top_k, top_p=support.top_p, min_p=support.min_p)
    law = slow_law(logits.double().tolist(), params)
    kept = [token for token, logprob in enumerate(law) if logprob > -math.inf]
    return logits.double().softmax(-1)[[*{*kept, target}]].sum().log(), kept


@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_the_mass_is_that_of_the_definition(support):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, VOCAB, generator=generator)
    targets = torch.randint(VOCAB, (50,), generator=generator)
    targets[::2] = logits[::2].argmax(-1)
    found = log_kept_mass(logits, targets, support)
    pairs = [slow_log_mass(*row, support) for row in zip(logits, targets.tolist(), strict=True)]
    torch.testing.assert_close(
        found.double(), torch.stack([m for m, _ in pairs]).double(), rtol=0, atol=2e-6
    )
    sizes = {len(kept) for _, kept in pairs}
    assert (sizes == {VOCAB}) == (support == SamplingSupport())
    if support == SamplingSupport():
        assert not found.any()


def test_the_drawn_token_counts_even_outside():
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    p = logits.softmax(-1)[0]
    found = log_kept_mass(logits, torch.tensor([2]), SamplingSupport(top_k=1))
    torch.testing.assert_close(found.exp()[0], p[0] + p[2])


@pytest.mark.parametrize("block_logits", [1, 3 * VOCAB, 10**6])
@pytest.mark.parametrize("chunk_size", [7, 64])
def test_blocks_and_chunks_change_nothing(block_logits, chunk_size):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(11, 8, generator=generator),
        torch.randn(VOCAB, 8, generator=generator),
    )
    bias = torch.randn(VOCAB, generator=generator)
    targets = torch.randint(VOCAB, (11,), generator=generator)
    support = SamplingSupport(top_k=9, top_p=0.8)
    logits = 3 * torch.tanh((hidden @ weight.T + bias) / 3) / 0.7
    layer = OutputLayer(weight, bias, LogitsTransform(0.7, 3.0))
    found = replay_support(
        hidden.requires_grad_(),
        layer,
        targets,
        support,
        chunk_size=chunk_size,
        block_logits=block_logits,
    )
    assert not found.requires_grad
    expected = log_kept_mass(logits, targets, support)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_no_rows_are_no_error():
    layer = OutputLayer(torch.randn(VOCAB, 8), None, LogitsTransform(1.0, None))
    none = torch.zeros(0, dtype=torch.int64)
    support = SamplingSupport(top_k=3, top_p=0.5, min_p=0.1)
    assert replay_support(torch.zeros(0, 8), layer, none, support, chunk_size=16).shape == (0,)


@plain_and_fused
def test_padded_and_packed_layouts_agree_and_gradients_stay(checkpoint, is_fused):
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(0, 256, (3, 12), generator=generator)
    attention_mask = torch.arange(12) < torch.tensor([[12], [5], [8]])
    scored_mask = attention_mask & (torch.arange(12) > 2)
    actor = Actor.from_pretrained(checkpoint, fused_linear_logprob=is_fused, chunk_size=100)
    support = SamplingSupport(top_k=30, top_p=0.7)

    def run(with_support):
        actor.zero_grad()
        output = actor(
            token_ids,
            attention_mask,
            scored_mask=scored_mask,
            temperature=0.8,
            recorded=Replayed(support if with_support else None),
        )
        output.logprobs.sum().backward()
        return output, {name: p.grad.clone() for name, p in actor.named_parameters()}

    plain, gradients = run(with_support=False)
    padded, same_gradients = run(with_support=True)
    actor.pack_samples()
    packed, _ = run(with_support=True)
    actor.pack_samples(False)
    assert plain.log_kept_mass is None
    assert torch.equal(plain.sampling_logprobs, plain.logprobs)
    assert torch.equal(plain.logprobs, padded.logprobs)
    assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)
    mass = padded.log_kept_mass
    assert not mass.requires_grad
    assert (mass[scored_mask] < 0).all()
    assert not mass[~scored_mask].any()
    torch.testing.assert_close(packed.log_kept_mass, mass, rtol=0, atol=1e-5)
    logits = actor.model.base_model(token_ids[:1]).last_hidden_state[0, :-1]
    logits = actor.model.get_output_embeddings()(logits) / 0.8
    expected = log_kept_mass(logits.detach(), token_ids[0, 1:], support)
    torch.testing.assert_close(mass[0, 3:], expected[2:], rtol=0, atol=1e-5)
