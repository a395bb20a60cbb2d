import pickle

import numpy as np
import pytest

from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.records.rollout import Rollout, ScoredRollout
from lightrft.records.table import exchange, merge, row_table, tabulate, to_wire


class ListGatherer:
    """Hands back what all ranks would have sent."""

    def __init__(self, others):
        self.others = others

    def gather_bytes(self, data):
        return [data, *self.others]


def scored(
    sample_id, *, prompt=(1, 2), response=(3,), components=None, finish="stop", masked=False
):
    completion = Completion(
        request_id=sample_id // 2,
        sample_index=sample_id % 2,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(response),
        output_logprobs=tuple(-0.5 * (i + 1) - sample_id for i in range(len(response))),
        logprobs_mode="temperature",
        finish_reason=finish,
        weights_version=3,
    )
    rollout = Rollout(
        Prompt(id=0, text="", token_ids=()), completion, sample_id // 2, sample_id, ""
    )
    return ScoredRollout(rollout, float(sample_id), components or {}, masked)


def random_items(seed, count):
    rng = np.random.default_rng(seed)
    return [
        scored(
            i,
            prompt=rng.integers(0, 50, rng.integers(1, 5)).tolist(),
            response=rng.integers(0, 50, rng.integers(0, 6)).tolist(),
        )
        for i in range(count)
    ]


def known(table):
    return [
        (int(i), int(g), int(p), int(r), float(reward))
        for i, g, p, r, reward in zip(
            table.sample_ids,
            table.group_ids,
            table.prompt_lengths,
            table.response_lengths,
            table.rewards,
            strict=True,
        )
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_knows_the_rows_of_one_process_in_sample_order(world_size):
    items = random_items(0, 12)
    whole = known(row_table(items))
    parts = [to_wire(items[rank::world_size]) for rank in range(world_size)]
    found = exchange(items[::world_size], ListGatherer(parts[1:]))
    assert known(found) == whole
    assert found.holders.tolist() == [i % world_size for i in range(12)]


def test_rows_with_an_empty_response_keep_their_neighbours_tokens_apart():
    items = [scored(0, response=()), scored(1, response=(7, 8)), scored(2, response=())]
    table = tabulate(items).take(np.array([2, 1, 0]))
    assert table.sample_ids.tolist() == [2, 1, 0]
    assert table.token_ids.tolist() == [1, 2, 1, 2, 7, 8, 1, 2]
    assert table.rollout_logprobs.tolist() == [-1.5, -2.0]


def test_a_component_that_only_one_rank_has_is_missing_elsewhere():
    table = merge(
        [
            row_table([scored(0, components={"a": 1.0})]),
            row_table([scored(1, components={"b": 2.0})]),
        ]
    )
    assert table.component_names == ("a", "b")
    np.testing.assert_array_equal(table.components, [[1.0, np.nan], [np.nan, 2.0]])


def test_a_rank_without_prompts_takes_part():
    table = merge([row_table([]), row_table([scored(1), scored(0)])])
    assert table.sample_ids.tolist() == [0, 1]


def test_the_same_sample_from_two_ranks_is_refused():
    with pytest.raises(ValueError, match=r"unique.*got \[1\]"):
        merge([row_table([scored(1)]), row_table([scored(1)])])


def test_flags_follow_their_rows():
    table = merge([row_table([scored(1, finish="length")]), row_table([scored(0, masked=True)])])
    assert table.is_truncated.tolist() == [False, True]
    assert table.is_masked.tolist() == [True, False]
    assert table.weights_versions.tolist() == [3, 3]


def test_a_failure_of_one_rank_is_raised_on_all():
    with pytest.raises(RuntimeError, match="rank 1 could not score its samples: reward broke"):
        exchange([scored(0)], ListGatherer([pickle.dumps("reward broke")]))
    with pytest.raises(KeyError, match="mine"):
        exchange(KeyError("mine"), ListGatherer([to_wire([scored(0)])]))
