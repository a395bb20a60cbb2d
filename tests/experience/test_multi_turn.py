"""Observations between turns are context: they enter no loss, no denominator and no statistic."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.records.exchange_cases import ragged_sample

from lightrft.config import TrainConfig
from lightrft.engines.types import Completion
from lightrft.records.batch import collate
from lightrft.records.table import tabulate
from lightrft.reporting.trajectories import spans
from lightrft.rewards.types import RewardResult
from lightrft.rollout.scoring import overlong_penalty, score_rollouts
from lightrft.stages.policy.step_metrics import table_metrics
from lightrft.tools.report.sample_page import token_sample


def flags(rollout):
    return list(rollout.completion.is_sampled)


def test_a_completion_says_which_of_its_tokens_were_sampled():
    base = {
        "request_id": 0,
        "sample_index": 0,
        "prompt_token_ids": (1,),
        "output_token_ids": (2, 3, 4),
        "output_logprobs": (-1.0, 0.0, -2.0),
        "logprobs_mode": "temperature",
        "finish_reason": "stop",
    }
    assert Completion(**base).is_sampled == (True, True, True)
    assert Completion(**base).sampled_token_ids == (2, 3, 4)
    mixed = Completion(**base, sampled=(True, False, True))
    assert mixed.sampled_token_ids == (2, 4)
    with pytest.raises(ValueError, match="3 tokens, 3 logprobs and 2 flags"):
        Completion(**base, sampled=(True, False))


def rows_of_turns(seed, num_rows=12):
    """Return scored rows in which sampled and observed tokens alternate, some masked."""
    rng = np.random.default_rng(seed)
    return [ragged_sample(rng, i, kind="turns") for i in range(num_rows)]


@pytest.mark.parametrize("seed", range(8))
def test_table_and_batch_hold_what_each_row_holds(seed):
    items = rows_of_turns(seed)
    items[5] = replace(items[5], is_masked=True)
    table = tabulate(items)
    assert table.sampled_lengths.tolist() == [sum(flags(i.rollout)) for i in items]
    order = np.random.default_rng(seed).permutation(12)
    taken = table.take(order)
    batch = collate(taken, temperature=1.0, device=torch.device("cpu"), version=7)
    for row, place in enumerate(order.tolist()):
        completion = items[place].rollout.completion
        width, start = batch.token_ids.shape[1], len(completion.prompt_token_ids)
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        mask = [False] * start + flags(items[place].rollout) + [False] * (width - len(ids))
        logprobs = [0.0] * start + list(completion.output_logprobs)
        assert batch.token_ids[row, : len(ids)].tolist() == ids
        assert batch.attention_mask[row].tolist() == [i < len(ids) for i in range(width)]
        is_masked = items[place].is_masked
        assert batch.response_mask[row].tolist() == [flag and not is_masked for flag in mask]
        assert batch.compared_mask[row].tolist() == batch.response_mask[row].tolist()
        kept = torch.zeros(width) if is_masked else torch.tensor(logprobs + [0.0] * width)[:width]
        assert torch.equal(batch.rollout_logprobs[row], kept)


def test_statistics_of_lengths_count_sampled_tokens():
    items = [replace(item, is_masked=False) for item in rows_of_turns(3)]
    table = tabulate(items)
    lengths = np.array([sum(flags(item.rollout)) for item in items])
    assert (lengths <= table.response_lengths).all()
    assert lengths.sum() < table.response_lengths.sum()
    metrics = table_metrics(table)
    assert metrics["response_length"] == lengths.mean()
    assert metrics["response_length_max"] == lengths.max()
    assert metrics["response_length_std"] == pytest.approx(lengths.std())


def test_the_length_penalty_looks_at_the_longest_turn():
    item = rows_of_turns(0, num_rows=1)[0].rollout
    sampled = (True,) * 4 + (False,) * 3 + (True,) * 6 + (False,) * 9 + (True,) * 2
    completion = replace(
        item.completion, output_token_ids=(1,) * 24, output_logprobs=(0.0,) * 24, sampled=sampled
    )
    config = TrainConfig(
        overlong_buffer=True,
        overlong_buffer_len=4,
        overlong_buffer_penalty_factor=1.0,
        generate_max_len=8,
    )
    scored = score_rollouts(
        [replace(item, completion=completion)],
        [RewardResult(0.0, {})],
        overlong_penalty=overlong_penalty(config),
    )
    assert scored[0].reward == -0.5  # 6 tokens: 2 into the buffer of 4


def test_the_report_tells_observations_from_sampled_tokens():
    assert spans([True, True, False, True]) == [(0, 2), (3, 4)]
    assert spans([False]) == []
    entry = {"tokens": ["a", "b", "c", "d"], "sampled_spans": [[0, 2], [3, 4]], "reward": 1.0}
    assert token_sample(entry)["observed"] == [False, False, True, False]
    # A file may hold anything.
    for wrong in (None, 3, [[0]], [["a", "b"]], [[-5, 99]]):
        assert len(token_sample({**entry, "sampled_spans": wrong})["observed"]) == 4
