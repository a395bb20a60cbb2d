"""Scored rollouts as flat arrays, and what all ranks learn of them.

After the exchange every rank knows the rows of the step, in the order of their sample ids: ids,
rewards, groups, lengths, masks. Statistics over them are therefore global and exact. Tokens stay
where they were sampled until `delivery` brings them to the ranks that train them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.records.types import ScoredRollout
from lightrft.rewards.types import RewardError
from lightrft.strategy.strategy_base import StrategyBase

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of scored rollouts beside their tokens, one row a sample.

    Args:
        sample_ids, group_ids: [rows] int64.
        prompt_lengths, response_lengths: [rows] int64, in tokens.
        rewards: [rows] float64, shaping included.
        accuracies: [rows] float64, what tells a right from a wrong response: the component
            "accuracy" if the reward has one, else the reward before shaping.
        component_names: Names of the reward components, sorted.
        components: [rows, components] float64; NaN where a row has no such component.
        is_truncated: [rows] bool; the token budget ended the response.
        is_masked: [rows] bool; excluded from the loss.
        is_untruncated: [rows] bool; no token was excluded from what the engine's logprobs measure.
        weights_versions: [rows] int64 of the weights that sampled the end of the row.
    """

    sample_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]
    accuracies: NDArray[np.float64]
    component_names: tuple[str, ...]
    components: NDArray[np.float64]
    is_truncated: NDArray[np.bool_]
    is_masked: NDArray[np.bool_]
    is_untruncated: NDArray[np.bool_]
    weights_versions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] int64: prompt plus response, in tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def columns(self) -> dict[str, object]:
        """What all tables of rows have."""
        return {field.name: getattr(self, field.name) for field in fields(Rows)}


@dataclass(frozen=True, slots=True)
class RowTable(Rows):
    """The rows of all ranks, on every rank, ordered by sample id.

    Args:
        sampled_lengths: [rows] int64: tokens of the response that were sampled, without
            observations.
        has_mixed_versions: [rows] bool; some token was sampled by other weights than the row's end.
        holders: [rows] int64, the rank that sampled the row and has its tokens.
        has_token_versions: Whether responses came from several calls of the engine.
    """

    sampled_lengths: NDArray[np.int64]
    has_mixed_versions: NDArray[np.bool_]
    holders: NDArray[np.int64]
    has_token_versions: bool = False

    def take(self, rows: NDArray[np.int64]) -> Self:
        """The given rows, in the given order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in KNOWN_COLUMNS})


@dataclass(frozen=True, slots=True)
class SampleTable(Rows):
    """Rows with their tokens.

    Args:
        token_ids: [sum of lengths] int32; prompt then response, row after row.
        rollout_logprobs: [sum of response lengths] float32, from the engine; 0 in observations.
        is_sampled: [sum of response lengths] bool, False for tokens of an observation, which are
            context only.
        token_versions: [sum of response lengths] int32 of the weights that sampled each token,
            -1 in observations; None where one call of the engine gave the whole response: those
            of the row's end.
    """

    token_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    is_sampled: NDArray[np.bool_]
    token_versions: NDArray[np.int32] | None = None

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[rows] int64: tokens of the response that were sampled, without observations."""
        stops = np.cumsum(self.response_lengths)
        counts = np.concatenate([[0], np.cumsum(self.is_sampled, dtype=np.int64)])
        found: NDArray[np.int64] = counts[stops] - counts[stops - self.response_lengths]
        return found

    def take(self, rows: NDArray[np.int64]) -> Self:
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


ROW_COLUMNS = tuple(field.name for field in fields(Rows) if field.name != "component_names")
KNOWN_COLUMNS = (*ROW_COLUMNS, "sampled_lengths", "has_mixed_versions", "holders")
# One row on the wire; the components follow as float64.
ROW_ON_WIRE = np.dtype(
    [
        ("sample_ids", "<i4"),
        ("group_ids", "<i4"),
        ("prompt_lengths", "<i4"),
        ("response_lengths", "<i4"),
        ("sampled_lengths", "<i4"),
        ("weights_versions", "<i4"),
        ("rewards", "<f8"),
        ("accuracies", "<f8"),
        ("is_truncated", "?"),
        ("is_masked", "?"),
        ("is_untruncated", "?"),
        ("has_mixed_versions", "?"),
    ]
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


def row_table(scored: Sequence[ScoredRollout], *, holder: int = 0) -> RowTable:
    """What all ranks are told of scored rollouts, in the given order.

    Args:
        scored: Samples of one rank.
        holder: The rank.
    """
    table = tabulate(scored)
    stops = np.cumsum(table.response_lengths)
    # Of observations -1, of all else that of the row's end: such versions need not travel.
    plain = np.where(
        table.is_sampled, np.repeat(table.weights_versions, table.response_lengths), -1
    )
    is_odd = np.zeros(len(plain), np.bool_)
    if table.token_versions is not None:
        is_odd = table.token_versions != plain
    counts = np.concatenate([[0], np.cumsum(is_odd, dtype=np.int64)])
    return RowTable(
        **table.columns,  # type: ignore[arg-type]
        sampled_lengths=table.sampled_lengths,
        has_mixed_versions=counts[stops] > counts[stops - table.response_lengths],
        holders=np.full(len(table), holder, dtype=np.int64),
        has_token_versions=table.token_versions is not None,
    )


def merge(tables: Sequence[RowTable]) -> RowTable:
    """All rows of the tables, ordered by sample id.

    Raises:
        ValueError: A sample id occurs twice.
    """
    names = tuple(sorted({name for table in tables for name in table.component_names}))
    aligned = [
        replace(t, component_names=names, components=_components_under(names, t)) for t in tables
    ]
    joined = RowTable(
        **{
            name: np.concatenate([getattr(table, name) for table in aligned])
            for name in KNOWN_COLUMNS
        },
        component_names=names,
        has_token_versions=all(table.has_token_versions for table in tables),
    )
    ordered = joined.take(np.argsort(joined.sample_ids, kind="stable").astype(np.int64))
    is_repeated = ordered.sample_ids[1:] == ordered.sample_ids[:-1]
    if is_repeated.any():
        repeated = sorted({int(i) for i in ordered.sample_ids[1:][is_repeated]})
        raise ValueError(
            f"sample ids must be unique over all ranks of a step: got {repeated[:10]} more than "
            "once; every rank must pass its own prompts at its own positions"
        )
    return ordered


def exchange(scored: Sequence[ScoredRollout] | Exception, strategy: StrategyBase) -> RowTable:
    """The rows of all ranks, ordered by sample id, on every rank.

    Args:
        scored: This rank's samples, or why there are none.
        strategy: Gathers the bytes of all ranks.

    Raises:
        RewardError: Another rank failed; every rank raises, so that none waits for it.
        Exception: This rank failed: its own exception.
    """
    message = pickle.dumps(str(scored)) if isinstance(scored, Exception) else to_wire(scored)
    outcomes = strategy.gather_bytes(message)
    if isinstance(scored, Exception):
        raise scored
    messages = [pickle.loads(data) for data in outcomes]
    failures = [(rank, item) for rank, item in enumerate(messages) if isinstance(item, str)]
    if failures:
        rank, text = failures[0]
        raise RewardError(f"rank {rank} could not score its samples: {text}")
    return merge([_from_wire(message, rank) for rank, message in enumerate(messages)])


def to_wire(scored: Sequence[ScoredRollout]) -> bytes:
    """What one rank tells all others of its samples."""
    table = row_table(scored)
    rows = np.zeros(len(table), dtype=ROW_ON_WIRE)
    for name in ROW_ON_WIRE.names or ():
        rows[name] = getattr(table, name)
    parts = rows.tobytes(), table.components.tobytes()
    return pickle.dumps((table.component_names, table.has_token_versions, *parts))


def _from_wire(message: tuple[tuple[str, ...], bool, bytes, bytes], holder: int) -> RowTable:
    names, has_versions, rows, components = message
    found = np.frombuffer(rows, dtype=ROW_ON_WIRE)
    kinds = {"i": np.int64, "f": np.float64, "b": np.bool_}
    return RowTable(
        **{
            name: found[name].astype(kinds[found[name].dtype.kind])
            for name in ROW_ON_WIRE.names or ()
        },
        component_names=names,
        components=np.frombuffer(components, np.float64).reshape(len(found), len(names)),
        holders=np.full(len(found), holder, dtype=np.int64),
        has_token_versions=has_versions,
    )


def _components_under(names: tuple[str, ...], table: RowTable) -> NDArray[np.float64]:
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
