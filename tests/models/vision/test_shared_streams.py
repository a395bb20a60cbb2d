"""Ranks that share a stream of rows with images compute what one rank does, from their parts."""

import pytest
import torch
import torch.distributed as dist
from tests.models.batches import relative_norm
from tests.models.vision import wrong_cuts
from tests.models.vision.test_scores import LOGPROB, gradients, scored
from tests.models.vision.thread_ranks import run_on_threads
from tests.models.vision.tiny_world import Batch, tiny

from lightrft.models.actor import Actor
from lightrft.models.vision import forward


def response_loss(logprobs):
    """Of the responses' logprobs; no two tokens weigh the same."""
    weights = (torch.arange(1, 1 + len(one)) / len(one) for one in logprobs)
    return sum((one * weight).sum() for one, weight in zip(logprobs, weights, strict=True))


def gaps(preset):
    """Of two ranks from each row alone: the largest of logprobs, and that of gradients."""
    model, encoder = tiny(preset)
    batch = Batch(model, encoder)
    alone = batch.each_alone(model)
    response_loss(alone).backward()
    alone = [one.detach() for one in alone]
    expected = gradients(model)
    twins = [tiny(preset)[0] for _ in range(2)]

    def work(rank):
        actor = Actor(twins[rank])
        actor.share_sequences(dist.group.WORLD)
        found = batch.of_rows(scored(actor, batch))
        response_loss(found).backward()
        return [one.detach() for one in found], gradients(twins[rank])

    ranks = run_on_threads(work, 2)
    largest = max(
        float((one - other).abs().max())
        for logprobs, _ in ranks
        for one, other in zip(logprobs, alone, strict=True)
    )
    zero = torch.zeros(())
    # The gradient of one loss is the sum over the ranks.
    total = {name: sum(part.get(name, zero) for _, part in ranks) for name in expected}
    return largest, relative_norm(total, expected)


def cases(table):
    return [pytest.param(p, cut, id=f"{p}-{cut.__name__}") for p in table for cut in table[p]]


# One of each way in which features reach the language model; the others take one of these.
@pytest.mark.parametrize(
    "preset", ["tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-gemma3", "tiny-llava-onevision"]
)
def test_ranks_that_share_rows_score_them_as_they_are_alone(preset):
    logprobs, gradient = gaps(preset)
    assert logprobs < LOGPROB
    assert gradient < 1e-5


@pytest.mark.parametrize("preset, cut", cases(wrong_cuts.SILENT))
def test_wrong_parts_of_a_stream_are_seen(preset, cut, monkeypatch):
    monkeypatch.setattr(forward, "cut_tokens", cut)
    logprobs, gradient = gaps(preset)
    assert logprobs > 0.05
    assert gradient > 0.05


@pytest.mark.parametrize("preset, cut", cases(wrong_cuts.LOUD))
def test_parts_of_another_shape_are_refused(preset, cut, monkeypatch):
    monkeypatch.setattr(forward, "cut_tokens", cut)
    with pytest.raises((ValueError, RuntimeError), match=r"do not match|must match the size"):
        gaps(preset)
