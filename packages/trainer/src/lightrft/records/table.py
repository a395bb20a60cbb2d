"""Scored rollouts as flat arrays, and their way to the ranks that train them.

After the exchange every rank knows the rows of the step, in the order of their sample ids: ids,
rewards, groups, lengths, masks. Statistics over them are therefore global and exact. Tokens stay
on their rank until the plan of the step says who trains them, and are then delivered. Since every
rank knows every row's lengths, a message is only values. `COLUMNS` defines what travels when.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.records.columns import COLUMNS, Column, Values, columns
from lightrft.records.rollout import ScoredRollout
from lightrft.rewards.types import RewardError
from lightrft.strategy.distributed.context import DistributedContext, RowExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """Facts of scored rollouts, one row a sample; after the exchange, of all ranks.

    Args:
        sample_ids, group_ids: [rows] int64.
        prompt_lengths, response_lengths: [rows] int64, in tokens.
        rewards: [rows] float64, shaping included.
        accuracies: [rows] float64, right against wrong responses: the component "accuracy" if the
            reward has one, else the reward before shaping.
        component_names: Names of the reward components, sorted.
        components: [rows, components] float64; NaN where a row has no such component.
        is_truncated: [rows] bool; the token budget ended the response.
        is_masked: [rows] bool; excluded from the loss.
        is_untruncated: [rows] bool; the engine's logprobs exclude no token.
        weights_versions: [rows] int64 of the weights that sampled the end of the row.
        sampled_lengths: [rows] int64: tokens of the response that were sampled, without
            observations.
        has_mixed_versions: [rows] bool; some token was sampled by other weights than the row's end.
        holders: [rows] int64, the rank that sampled the row and has its tokens.
        facts: Columns without a field here, by name.
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
    sampled_lengths: NDArray[np.int64]
    has_mixed_versions: NDArray[np.bool_]
    holders: NDArray[np.int64]
    facts: Mapping[str, Values] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, name: str) -> Values:
        values: Values = self.facts[name] if name in self.facts else getattr(self, name)
        return values

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] int64: prompt plus response, in tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def has_observations(self) -> NDArray[np.bool_]:
        """[rows] bool; some tokens of the response were not sampled."""
        has_some: NDArray[np.bool_] = self.sampled_lengths < self.response_lengths
        return has_some

    @property
    def is_undecided(self) -> NDArray[np.bool_]:
        """[rows] bool; excluded because the reward could not decide the response."""
        if "undecided" not in self.component_names:
            return np.zeros(len(self), np.bool_)
        flags = self.components[:, self.component_names.index("undecided")]
        is_undecided: NDArray[np.bool_] = self.is_masked & (flags == 1)
        return is_undecided

    @property
    def columns(self) -> dict[str, Values]:
        """All columns by name."""
        names = [
            item.name for item in fields(self) if item.name not in ("component_names", "facts")
        ]
        return {name: self[name] for name in (*names, *self.facts)}

    def counts(self, column: Column) -> NDArray[np.int64]:
        """Return [rows] int64: numbers of values of a column."""
        if column.level == "row":
            return np.ones(len(self), np.int64)
        names = {"token": "lengths", "response token": "response_lengths"}
        return self[names.get(column.level, column.level)].astype(np.int64)

    def take(self, rows: NDArray[np.int64]) -> Self:
        """Return these rows in this order."""
        taken = self.columns
        for name, values in taken.items():
            column = COLUMNS.get(name)
            if column is None or column.level == "row":
                taken[name] = values[rows]
            else:
                stops = np.cumsum(self.counts(column))
                starts = np.concatenate([[0], stops])
                pieces = [values[starts[row] : stops[row]] for row in rows]
                taken[name] = np.concatenate([values[:0], *pieces])
        return build_table(type(self), self.component_names, taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable(RowTable):
    """Rows with their tokens.

    Args:
        token_ids: [sum of lengths] int32; prompt then response, row after row.
        rollout_logprobs: [sum of response lengths] float32, from the engine; 0 in observations.
        is_sampled: [sum of response lengths] bool, False for tokens of an observation, which are
            context only.
        token_versions: [sum of response lengths] int32 of the weights that sampled each token,
            -1 in observations.
    """

    token_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    is_sampled: NDArray[np.bool_]
    token_versions: NDArray[np.int32]

    def per_token(self, column: Column) -> Values:
        """Return [sum of lengths] values of a column of responses, filled up on prompts."""
        values = self[column.name]
        if column.level == "token":
            return values
        starts = np.cumsum(self.lengths) - self.lengths
        places = np.arange(self.lengths.sum()) - np.repeat(starts, self.lengths)
        filled = np.full(len(places), column.fill, values.dtype)
        filled[places >= np.repeat(self.prompt_lengths, self.lengths)] = values
        return filled


# Rows of one episode share its reward. The first row has its sample id; the ids of further rows
# are larger by multiples of this, so that first rows come first. Steps have fewer samples, and
# row ids have 32 bits on the wire.
BRANCH_STEP = 2**24
MAX_BRANCHES = 2**31 // BRANCH_STEP
Table = TypeVar("Table", bound=RowTable)
_FIELDS = {item.name for item in fields(SampleTable)}


def build_table(kind: type[Table], names: tuple[str, ...], columns: Mapping[str, Values]) -> Table:
    """Return a table of columns, with the names of its reward components."""
    field_names = {item.name for item in fields(kind)}
    return kind(
        **{name: values for name, values in columns.items() if name in field_names},  # type: ignore[arg-type]
        component_names=names,
        facts={name: values for name, values in columns.items() if name not in _FIELDS},
    )


def tabulate(scored: Sequence[ScoredRollout]) -> SampleTable:
    """Return scored rollouts as a table, in this order."""
    return _read(SampleTable, scored, COLUMNS.values())


def row_table(scored: Sequence[ScoredRollout]) -> RowTable:
    """Return the rows of scored rollouts as the exchange sends them, in this order."""
    return _read(RowTable, scored, columns("exchange"))


def _read(kind: type[Table], scored: Sequence[ScoredRollout], wanted: Iterable[Column]) -> Table:
    names = tuple(sorted({name for item in scored for name in item.components}))
    rewards = [[item.components.get(name, np.nan) for name in names] for item in scored]
    values = {column.name: column.read(scored) for column in wanted}
    values["components"] = np.array(rewards, np.float64).reshape(len(scored), len(names))
    values["holders"] = np.zeros(len(scored), np.int64)
    return build_table(kind, names, values)


def merge(tables: Sequence[RowTable]) -> RowTable:
    """Return all rows of the tables, ordered by sample id.

    Raises:
        ValueError: A sample id occurs twice.
    """
    ordered = join_tables(tables)
    is_repeated = ordered.sample_ids[1:] == ordered.sample_ids[:-1]
    if is_repeated.any():
        repeated = sorted({int(i) for i in ordered.sample_ids[1:][is_repeated]})
        raise ValueError(
            f"sample ids must be unique over all ranks of a step: got {repeated[:10]} more than "
            "once; every rank must pass its own prompts at its own positions"
        )
    return ordered


def join_tables(tables: Sequence[Table]) -> Table:
    """Return all rows of the tables with all columns, ordered by sample id."""
    names = tuple(sorted({name for table in tables for name in table.component_names}))
    aligned = [{**table.columns, "components": _components_under(names, table)} for table in tables]
    joined = build_table(type(tables[0]), names, _concatenate(aligned))
    return joined.take(np.argsort(joined.sample_ids, kind="stable").astype(np.int64))


def _concatenate(tables: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def _components_under(names: tuple[str, ...], table: RowTable) -> NDArray[np.float64]:
    values = np.full((len(table), len(names)), np.nan)
    for column, name in enumerate(table.component_names):
        values[:, names.index(name)] = table.components[:, column]
    return values


def exchange(scored: Sequence[ScoredRollout] | Exception, context: DistributedContext) -> RowTable:
    """Return the rows of all ranks, ordered by sample id, on every rank.

    Args:
        scored: This rank's samples, or the reason why there are none.
        context: Process groups, to gather the bytes of all ranks.

    Raises:
        RewardError: Another rank failed; every rank raises, so that no rank waits for it.
        Exception: This rank failed; its exception.
    """
    message = pickle.dumps(str(scored)) if isinstance(scored, Exception) else to_wire(scored)
    outcomes = context.gather_bytes(message)
    if isinstance(scored, Exception):
        raise scored
    messages = [pickle.loads(data) for data in outcomes]
    failures = [(rank, item) for rank, item in enumerate(messages) if isinstance(item, str)]
    if failures:
        rank, text = failures[0]
        raise RewardError(f"rank {rank} could not score its samples: {text}")
    return merge([_from_wire(message, rank) for rank, message in enumerate(messages)])


def to_wire(scored: Sequence[ScoredRollout]) -> bytes:
    """Return the message of one rank to all others about its samples."""
    table = row_table(scored)
    values = [column.to_wire(table[column.name]) for column in columns("exchange")]
    data = b"".join([*values, table.components.tobytes()])
    return pickle.dumps((table.component_names, len(table), data))


def _from_wire(message: tuple[tuple[str, ...], int, bytes], holder: int) -> RowTable:
    names, count, data = message
    received, rest = dict[str, Values](), memoryview(data)
    for column in columns("exchange"):
        received[column.name], rest = column.from_wire(rest, count)
    received["components"] = np.frombuffer(rest, np.float64).reshape(count, len(names))
    received["holders"] = np.full(count, holder, dtype=np.int64)
    return build_table(RowTable, names, received)


def deliver_rows(
    table: RowTable,
    own: SampleTable,
    wanted: Sequence[NDArray[np.int64]],
    context: RowExchange,
) -> SampleTable:
    """Return the rows that this rank wants, with their tokens; collective.

    Args:
        table: Rows of all ranks.
        own: Samples of this rank, in any order; samples beyond `table` do no harm.
        wanted: Rows of `table` that each rank wants, equal on all ranks.
        context: Exchange of bytes between ranks.

    Returns:
        The rows `wanted[rank]`, in that order.
    """
    rank = context.rank
    places = {sample_id: place for place, sample_id in enumerate(own.sample_ids.tolist())}
    parts = []
    for rows in wanted:
        mine = rows[table.holders[rows] == rank]
        held = np.array([places[i] for i in table.sample_ids[mine].tolist()], dtype=np.int64)
        parts.append(_pack(own.take(held), table.take(mine)))
    rows = wanted[rank]
    holders = table.holders[rows]
    delivered = [
        _unpack(data, table.take(rows[holders == sender]))
        for sender, data in enumerate(context.exchange_bytes(parts))
    ]
    order = np.argsort(holders, kind="stable")
    arrived = table.take(rows[order])
    joined = build_table(
        SampleTable, table.component_names, {**arrived.columns, **_concatenate(delivered)}
    )
    return joined.take(np.argsort(order).astype(np.int64))


def _pack(samples: SampleTable, rows: RowTable) -> bytes:
    """Return the delivered values of some rows, whose `RowTable` every rank knows."""
    parts = []
    for column in columns("delivery"):
        values = samples[column.name]
        parts.append(
            column.to_wire(values[_is_sent(column, rows)] if column.sent_where else values)
        )
    return b"".join(parts)


def _unpack(data: bytes, rows: RowTable) -> dict[str, Values]:
    """Return the values that `_pack` packed of the rows."""
    unpacked: dict[str, Values] = {}
    rest = memoryview(data)
    for column in columns("delivery"):
        if not column.sent_where:
            unpacked[column.name], rest = column.from_wire(rest, int(rows.counts(column).sum()))
            continue
        is_sent, values = _is_sent(column, rows), _implied(column, rows, unpacked)
        values[is_sent], rest = column.from_wire(rest, int(is_sent.sum()))
        unpacked[column.name] = values
    return unpacked


def _is_sent(column: Column, rows: RowTable) -> NDArray[np.bool_]:
    """Return [values] bool: whether a value is sent, for a column that some rows imply."""
    return np.repeat(rows[column.sent_where].astype(np.bool_), rows.counts(column))


def _implied(column: Column, rows: RowTable, found: Mapping[str, Values]) -> Values:
    """Return the values of a column as if none were sent."""
    counts = rows.counts(column)
    if column.implied is True:
        return np.full(counts.sum(), True, column.dtype)
    values = np.repeat(rows[column.implied], counts)
    return np.where(found["is_sampled"], values, column.fill).astype(column.dtype)


def branch_id(sample_id: int, number: int) -> int:
    """Return the id of a row of an episode.

    Raises:
        ValueError: There are too many branches, or samples.
    """
    if number >= MAX_BRANCHES or sample_id >= BRANCH_STEP:
        raise ValueError(
            f"an episode has at most {MAX_BRANCHES} branches, and a step {BRANCH_STEP} samples: "
            f"got branch {number} of sample {sample_id}"
        )
    return sample_id + number * BRANCH_STEP


def episode_places(table: RowTable) -> NDArray[np.int64]:
    """Return [rows] int64: the place of the first row of each row's episode."""
    episode_ids: NDArray[np.int64] = table.sample_ids % BRANCH_STEP
    first = table.sample_ids[table.sample_ids < BRANCH_STEP]
    return np.searchsorted(first, episode_ids).astype(np.int64)


def episodes_of(table: RowTable) -> RowTable:
    """Return one row an episode, with the tokens sampled in all of its branches.

    Without branches it is the table itself.
    """
    is_first = table.sample_ids < BRANCH_STEP
    if is_first.all():
        return table
    first = table.take(np.flatnonzero(is_first).astype(np.int64))
    totals = np.bincount(episode_places(table), table.sampled_lengths, len(first))
    first.sampled_lengths[:] = totals.astype(np.int64)
    return first


def row_shares(table: RowTable) -> NDArray[np.float64] | None:
    """Return [rows] shares in the sampled tokens of the rows' episodes; None without branches."""
    if (table.sample_ids < BRANCH_STEP).all():
        return None
    places = episode_places(table)
    totals = np.bincount(places, table.sampled_lengths)
    shares: NDArray[np.float64] = table.sampled_lengths / np.maximum(totals[places], 1)
    return shares
