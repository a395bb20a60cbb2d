"""Which unfinished groups go on, in which order, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion, SamplingParams
from lightrft.rollout.partial import finish_groups, open_groups
from lightrft.rollout.source import PartialRolloutState

LIMIT = 30
PARAMS = SamplingParams(max_tokens=LIMIT, n=2, seed=5)


class Scripted:
    """Responses of prompt p end after p tokens; token t of a response is t."""

    rank, world_size = 0, 1

    def __init__(self):
        self.context = self
        self.engine = SimpleNamespace(weights_version=0)
        self.seeds = []

    def gather_objects(self, item):
        return [item]

    def gather_and_generate(self, batch, params, on_finished, *, sleep_engine):
        assert not sleep_engine
        self.seeds.append(params.seed)
        return [self.complete(request) for request in batch.token_ids]

    def complete(self, request):
        length, *so_far = request.prompt_token_ids
        left = min(request.max_tokens, length - len(so_far))
        tokens = tuple(range(len(so_far), len(so_far) + left))
        is_over = len(so_far) + left == length and length < LIMIT
        return Completion(
            request_id=request.request_id,
            sample_index=0,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=tokens,
            output_logprobs=tuple(-float(t) for t in tokens),
            logprobs_mode="temperature",
            finish_reason="stop" if is_over else "length",
            weights_version=self.engine.weights_version,
        )


def run(lengths_by_step, *, max_staleness, num_prompts=4, chunk=2):
    """Trained lengths and oldest ages, step by step; each step draws the given prompts."""
    strategy, carry, first = Scripted(), PartialRolloutState(), 0
    config = TrainConfig(
        rollout_batch_size=2,
        partial_rollout=True,
        partial_rollout_prompts=num_prompts,
        partial_rollout_tokens=chunk,
        max_staleness=max_staleness,
    )
    steps = []
    for version, lengths in enumerate(lengths_by_step):
        strategy.engine.weights_version = version
        prompts = [Prompt(first + i, "", (n,)) for i, n in enumerate(lengths)]
        new = open_groups(prompts, first_request_id=first, group_size=2, context=strategy)
        first += len(prompts)
        carry = PartialRolloutState((*carry.groups, *new), carry.num_calls, carry.weights_version)
        chosen, report = finish_groups(
            carry, 2, config=config, sampling_params=PARAMS, session=strategy
        )
        carry = report.carry
        ages = [version - (group.oldest_version or 0) for group in chosen]
        steps.append(([group.prompt.token_ids[0] for group in chosen], ages, report))
        for group in chosen:
            for sample in group.samples:
                assert sample.token_ids == tuple(range(group.prompt.token_ids[0]))
                assert sample.logprobs == tuple(-float(t) for t in sample.token_ids)
                assert list(sample.versions) == sorted(sample.versions)
    return strategy, steps


def test_a_long_response_is_carried_until_it_would_become_too_old():
    lengths = [[3, 27, 4, 2], [3, 3], [3, 3], [3, 3], [3, 3]]
    for bound, expected in ((9, None), (2, 2), (1, 1)):
        _, steps = run(lengths, max_staleness=bound)
        when = [i for i, (trained, _, _) in enumerate(steps) if 27 in trained]
        assert when == ([] if expected is None else [expected])
        assert max(age for _, ages, _ in steps for age in ages) <= bound


def test_a_token_keeps_the_version_that_sampled_it_and_every_call_has_its_own_seed():
    strategy, steps = run([[3, 9, 4, 2], [3, 3]], max_staleness=1)
    trained, ages, report = steps[1]
    assert trained == [9, 2]
    assert ages[0] == 1
    assert len(set(strategy.seeds)) == len(strategy.seeds) == report.carry.num_calls
    assert PARAMS.seed not in strategy.seeds


def test_finished_groups_that_are_not_needed_wait_and_only_so_many_are_in_flight():
    _, steps = run([[2, 2, 2, 2, 2], [5, 5]], max_staleness=3, num_prompts=3)
    _, _, first = steps[0]
    assert first.num_carried == 1
    assert first.num_carried_tokens == 4
    assert first.num_sampled_tokens == 3 * 2 * 2
    # The one that waits is trained before any other.
    trained, ages, second = steps[1]
    assert trained == [2, 2]
    assert ages == [1, 0]
    assert second.num_chunks == 1


def test_a_response_at_the_limit_is_finished_there():
    _, steps = run([[LIMIT, LIMIT]], max_staleness=1, chunk=7)
    assert steps[0][0] == [LIMIT, LIMIT]
    with pytest.raises(ValueError, match="2 prompts or more: got 1"):
        run([[3]], max_staleness=1)
