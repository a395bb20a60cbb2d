"""Scored rollouts as flat arrays, and their exchange between ranks.

After the exchange every rank holds all samples of the step, in the order of their sample ids.
Rewards, groups and lengths are therefore global, and any rank can build any training row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.experience.types import ScoredRollout
from lightrft.rewards.errors import RewardError
from lightrft.strategy.strategy_base import StrategyBase

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Scored rollouts, one row a sample, ordered by sample id.

    Args:
        sample_ids, group_ids: [rows] int64.
        prompt_lengths, response_lengths: [rows] int64, in tokens.
        token_ids: [sum of lengths] int64; prompt then response, row after row.
        rollout_logprobs: [sum of response lengths] float32, from the engine.
        rewards: [rows] float64, shaping included.
        accuracies: [rows] float64, what tells a right from a wrong response: the component
            "accuracy" if the reward has one, else the reward before shaping.
        component_names: Names of the reward components, sorted.
        components: [rows, components] float64; NaN where a row has no such component.
        is_truncated: [rows] bool; the token budget ended the response.
        is_masked: [rows] bool; excluded from the loss.
        is_untruncated: [rows] bool; no token was excluded from what `rollout_logprobs` measure.
        weights_versions: [rows] int64 of the weights that sampled the end of the row.
        token_versions: [sum of response lengths] int64 of the weights that sampled each token.
    """

    sample_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    rollout_logprobs: NDArray[np.float32]
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    component_names: tuple[str, ...]
    components: NDArray[np.float64]
    is_truncated: NDArray[np.bool_]
    is_masked: NDArray[np.bool_]
    is_untruncated: NDArray[np.bool_]
    weights_versions: NDArray[np.int64]
    token_versions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] int64: prompt plus response, in tokens."""
        return self.prompt_lengths + self.response_lengths

    def take(self, rows: NDArray[np.int64]) -> SampleTable:
        """The given rows, in the given order."""
        return SampleTable(
            sample_ids=self.sample_ids[rows],
            group_ids=self.group_ids[rows],
            prompt_lengths=self.prompt_lengths[rows],
            response_lengths=self.response_lengths[rows],
            token_ids=_take_segments(self.token_ids, self.lengths, rows),
            rollout_logprobs=_take_segments(self.rollout_logprobs, self.response_lengths, rows),
            rewards=self.rewards[rows],
            accuracies=self.accuracies[rows],
            component_names=self.component_names,
            components=self.components[rows],
            is_truncated=self.is_truncated[rows],
            is_masked=self.is_masked[rows],
            is_untruncated=self.is_untruncated[rows],
            weights_versions=self.weights_versions[rows],
            token_versions=_take_segments(self.token_versions, self.response_lengths, rows),
        )


def tabulate(scored: Sequence[ScoredRollout]) -> SampleTable:
    """Scored rollouts as a table, in the given order."""
    completions = [item.rollout.completion for item in scored]
    names = tuple(sorted({name for item in scored for name in item.components}))
    tokens = [token for c in completions for token in (*c.prompt_token_ids, *c.output_token_ids)]
    components = [[item.components.get(name, np.nan) for name in names] for item in scored]
    return SampleTable(
        sample_ids=np.array([item.rollout.sample_id for item in scored], dtype=np.int64),
        group_ids=np.array([item.rollout.group_id for item in scored], dtype=np.int64),
        prompt_lengths=np.array([len(c.prompt_token_ids) for c in completions], dtype=np.int64),
        response_lengths=np.array([len(c.output_token_ids) for c in completions], dtype=np.int64),
        token_ids=np.array(tokens, dtype=np.int64),
        rollout_logprobs=np.array(
            [value for c in completions for value in c.output_logprobs], dtype=np.float32
        ),
        rewards=np.array([item.reward for item in scored], dtype=np.float64),
        accuracies=np.array([item.accuracy for item in scored], dtype=np.float64),
        component_names=names,
        components=np.array(components, dtype=np.float64).reshape(len(scored), len(names)),
        is_truncated=np.array([c.finish_reason == "length" for c in completions], dtype=np.bool_),
        is_masked=np.array([item.is_masked for item in scored], dtype=np.bool_),
        is_untruncated=np.array([c.logprobs_mode == "temperature" for c in completions], np.bool_),
        weights_versions=np.array([c.weights_version for c in completions], dtype=np.int64),
        token_versions=np.array([v for item in scored for v in _versions(item)], dtype=np.int64),
    )


def _versions(item: ScoredRollout) -> tuple[int, ...]:
    completion = item.rollout.completion
    if item.rollout.token_versions is not None:
        return item.rollout.token_versions
    return (completion.weights_version,) * len(completion.output_token_ids)


def merge(tables: Sequence[SampleTable]) -> SampleTable:
    """All rows of the tables, ordered by sample id.

    Raises:
        ValueError: A sample id occurs twice.
    """
    names = tuple(sorted({name for table in tables for name in table.component_names}))
    joined = SampleTable(
        sample_ids=np.concatenate([t.sample_ids for t in tables]),
        group_ids=np.concatenate([t.group_ids for t in tables]),
        prompt_lengths=np.concatenate([t.prompt_lengths for t in tables]),
        response_lengths=np.concatenate([t.response_lengths for t in tables]),
        token_ids=np.concatenate([t.token_ids for t in tables]),
        rollout_logprobs=np.concatenate([t.rollout_logprobs for t in tables]),
        rewards=np.concatenate([t.rewards for t in tables]),
        accuracies=np.concatenate([t.accuracies for t in tables]),
        component_names=names,
        components=np.concatenate([_components_under(names, t) for t in tables]),
        is_truncated=np.concatenate([t.is_truncated for t in tables]),
        is_masked=np.concatenate([t.is_masked for t in tables]),
        is_untruncated=np.concatenate([t.is_untruncated for t in tables]),
        weights_versions=np.concatenate([t.weights_versions for t in tables]),
        token_versions=np.concatenate([t.token_versions for t in tables]),
    )
    order = np.argsort(joined.sample_ids, kind="stable").astype(np.int64)
    ordered = joined.take(order)
    is_repeated = ordered.sample_ids[1:] == ordered.sample_ids[:-1]
    if is_repeated.any():
        repeated = sorted({int(i) for i in ordered.sample_ids[1:][is_repeated]})
        raise ValueError(
            f"sample ids must be unique over all ranks of a step: got {repeated[:10]} more than "
            "once; every rank must pass its own prompts at its own positions"
        )
    return ordered


def exchange(scored: Sequence[ScoredRollout] | Exception, strategy: StrategyBase) -> SampleTable:
    """The samples of all ranks, ordered by sample id, on every rank.

    Args:
        scored: This rank's samples, or why there are none.
        strategy: Gathers the objects of all ranks.

    Raises:
        RewardError: Another rank failed; every rank raises, so that none waits for it.
        Exception: This rank failed: its own exception.
    """
    outcome: SampleTable | str = str(scored) if isinstance(scored, Exception) else tabulate(scored)
    outcomes: list[SampleTable | str] = strategy.gather_objects(outcome)
    if isinstance(scored, Exception):
        raise scored
    failures = [(rank, item) for rank, item in enumerate(outcomes) if isinstance(item, str)]
    if failures:
        rank, text = failures[0]
        raise RewardError(f"rank {rank} could not score its samples: {text}")
    return merge([table for table in outcomes if isinstance(table, SampleTable)])


def _components_under(names: tuple[str, ...], table: SampleTable) -> NDArray[np.float64]:
    values = np.full((len(table), len(names)), np.nan)
    for column, name in enumerate(table.component_names):
        values[:, names.index(name)] = table.components[:, column]
    return values


def _take_segments(
    flat: NDArray[Scalar],
    lengths: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> NDArray[Scalar]:
    stops = np.cumsum(lengths)
    pieces = [flat[stops[row] - lengths[row] : stops[row]] for row in rows]
    return np.concatenate(pieces) if pieces else flat[:0]
