"""A vocabulary split over ranks gives what one rank gives, with one all-gather."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightrft.kernels import VocabShard, Workspace, linear_logprob
from lightrft.strategy.testing import run_multiprocess

pytestmark = pytest.mark.shard("strategies")


def make_inputs(num_tokens=41, vocab=203, size=16):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (3 / math.sqrt(size))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[::5] = -100
    upstream = torch.randn(2, num_tokens, generator=generator)
    upstream[:, 1::7] = 0
    return hidden, weight, bias, targets, upstream


def value_and_gradients(leaves, targets, upstream, **options):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    hidden, weight, bias = leaves
    output = linear_logprob(
        hidden, weight, targets, bias=bias, temperature=0.8, entropy="grad", **options
    )
    loss = (output.logprobs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()
    return (output.logprobs, output.entropy), torch.autograd.grad(loss, leaves)


def compare(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    hidden, weight, bias, targets, upstream = make_inputs()
    vocab = len(weight)
    expected, gradients = value_and_gradients((hidden, weight, bias), targets, upstream)
    # One even cut with padding behind the last token, and one where a rank holds padding only.
    for step in (-(-vocab // world) + 3, -(-vocab // max(1, world - 1))):
        start = rank * step
        padded = torch.full((step * world, weight.shape[1]), 7.0)
        padded[:vocab] = weight
        padded_bias = torch.full((step * world,), 50.0)
        padded_bias[:vocab] = bias
        part = slice(start, start + step)
        real = max(0, min(step, vocab - start))
        with torch.autograd.profiler.profile() as profile:
            got, local = value_and_gradients(
                (hidden, padded[part], padded_bias[part]),
                targets,
                upstream,
                tp=VocabShard(None, start, vocab),
                workspace=Workspace(64),
            )
        counts = {event.key: event.count for event in profile.key_averages()}
        collectives = {name: n for name, n in counts.items() if name.startswith("gloo:")}
        # And one all-reduce, of the hidden gradient.
        assert collectives == {"gloo:all_gather": 1, "gloo:all_reduce": 1}, counts
        for value, reference in zip(got, expected, strict=True):
            assert torch.allclose(value, reference, atol=1e-5, rtol=0)
        assert (local[0] - gradients[0]).norm() < 3e-6 * gradients[0].norm()
        for value, reference in zip(local[1:], gradients[1:], strict=True):
            error = (value[:real] - reference[start : start + real]).norm()
            assert error < 3e-6 * reference.norm()
            assert not value[real:].any()
    # Positive control: a shard that believes it starts elsewhere is noticed.
    wrong, _ = value_and_gradients(
        (hidden, padded[part], padded_bias[part]),
        targets,
        upstream,
        tp=VocabShard(None, start + 1, vocab + 1),
        workspace=Workspace(64),
    )
    assert not torch.allclose(wrong[0], expected[0], atol=1e-2)
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_two_ranks_equal_one():
    run_multiprocess(compare, 2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_ranks_equal_one():
    run_multiprocess(compare, 4)


def test_a_shard_must_lie_in_a_vocabulary():
    with pytest.raises(ValueError, match="start >= 0 and vocab_size >= 1"):
        VocabShard(None, -1, 20)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 20\)"):
        linear_logprob(
            torch.randn(2, 4),
            torch.randn(32, 4),
            torch.tensor([1, 20]),
            tp=VocabShard(None, 0, 20),
        )
