"""Scored rollouts as flat arrays, and their exchange between ranks.

After the exchange every rank holds all samples of the step, in the order of their sample ids.
Rewards, groups and lengths are therefore global, and any rank can build any training row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.experience.types import ScoredRollout
from lightrft.rewards.types import RewardError
from lightrft.strategy.strategy_base import StrategyBase

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Scored rollouts, one row a sample, ordered by sample id.

    Args:
        sample_ids, group_ids: [rows] int64.
        prompt_lengths, response_lengths: [rows] int64, in tokens.
        token_ids: [sum of lengths] int32; prompt then response, row after row.
        rollout_logprobs: [sum of response lengths] float32, from the engine; 0 in observations.
        is_sampled: [sum of response lengths] bool, False for tokens of an observation, which are
            context only.
        rewards: [rows] float64, shaping included.
        accuracies: [rows] float64, what tells a right from a wrong response: the component
            "accuracy" if the reward has one, else the reward before shaping.
        component_names: Names of the reward components, sorted.
        components: [rows, components] float64; NaN where a row has no such component.
        is_truncated: [rows] bool; the token budget ended the response.
        is_masked: [rows] bool; excluded from the loss.
        is_untruncated: [rows] bool; no token was excluded from what `rollout_logprobs` measure.
        weights_versions: [rows] int64 of the weights that sampled the end of the row.
        token_versions: [sum of response lengths] int32 of the weights that sampled each token,
            -1 in observations; None where one call of the engine gave the whole response: those
            of the row's end.
    """

    sample_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    is_sampled: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    component_names: tuple[str, ...]
    components: NDArray[np.float64]
    is_truncated: NDArray[np.bool_]
    is_masked: NDArray[np.bool_]
    is_untruncated: NDArray[np.bool_]
    weights_versions: NDArray[np.int64]
    token_versions: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] int64: prompt plus response, in tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[rows] int64: tokens of the response that were sampled, without observations."""
        stops = np.cumsum(self.response_lengths)
        counts = np.concatenate([[0], np.cumsum(self.is_sampled, dtype=np.int64)])
        found: NDArray[np.int64] = counts[stops] - counts[stops - self.response_lengths]
        return found

    def take(self, rows: NDArray[np.int64]) -> SampleTable:
        """The given rows, in the given order."""
        versions = self.token_versions
        if versions is not None:
            versions = _take_segments(versions, self.response_lengths, rows)
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in ROW_COLUMNS},
            token_ids=_take_segments(self.token_ids, self.lengths, rows),
            rollout_logprobs=_take_segments(self.rollout_logprobs, self.response_lengths, rows),
            is_sampled=_take_segments(self.is_sampled, self.response_lengths, rows),
            token_versions=versions,
        )


TOKEN_COLUMNS = ("token_ids", "rollout_logprobs", "is_sampled")
ROW_COLUMNS = tuple(
    field.name
    for field in fields(SampleTable)
    if field.name not in (*TOKEN_COLUMNS, "token_versions", "component_names")
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
        token_ids=np.array(tokens, dtype=np.int32),
        rollout_logprobs=np.array(
            [value for c in completions for value in c.output_logprobs], dtype=np.float32
        ),
        is_sampled=np.array([flag for c in completions for flag in c.is_sampled], dtype=np.bool_),
        rewards=np.array([item.reward for item in scored], dtype=np.float64),
        accuracies=np.array([item.accuracy for item in scored], dtype=np.float64),
        component_names=names,
        components=np.array(components, dtype=np.float64).reshape(len(scored), len(names)),
        is_truncated=np.array([c.finish_reason == "length" for c in completions], dtype=np.bool_),
        is_masked=np.array([item.is_masked for item in scored], dtype=np.bool_),
        is_untruncated=np.array([c.logprobs_mode == "temperature" for c in completions], np.bool_),
        weights_versions=np.array([c.weights_version for c in completions], dtype=np.int64),
        token_versions=_token_versions(scored),
    )


def _token_versions(scored: Sequence[ScoredRollout]) -> NDArray[np.int32] | None:
    versions: list[int] = []
    for item in scored:
        if item.rollout.token_versions is None:
            return None
        versions += item.rollout.token_versions
    return np.array(versions, dtype=np.int32)


def merge(tables: Sequence[SampleTable]) -> SampleTable:
    """All rows of the tables, ordered by sample id.

    Raises:
        ValueError: A sample id occurs twice.
    """
    names = tuple(sorted({name for table in tables for name in table.component_names}))
    aligned = [
        replace(t, component_names=names, components=_components_under(names, t)) for t in tables
    ]
    columns = {
        name: np.concatenate([getattr(table, name) for table in aligned])
        for name in (*ROW_COLUMNS, *TOKEN_COLUMNS)
    }
    versions = [table.token_versions for table in tables if table.token_versions is not None]
    joined = SampleTable(
        **columns,
        component_names=names,
        token_versions=np.concatenate(versions) if len(versions) == len(tables) else None,
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
    flat: NDArray[Scalar], lengths: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[Scalar]:
    stops = np.cumsum(lengths)
    pieces = [flat[stops[row] - lengths[row] : stops[row]] for row in rows]
    return np.concatenate(pieces) if pieces else flat[:0]
