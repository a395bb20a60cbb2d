"""Rows that are sampled but not yet trained on, and their form in checkpoints.

A checkpoint holds one JSON text for each rank that had rows. If a run continues with another
number of ranks, the rows of rank r go to rank r modulo that number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightrft.config.files import parse_json, typed
from lightrft.config.options import type_hints
from lightrft.datasets.prompt_sampler import GroupResult
from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry
from lightrft.engines.media.media import LaterImages, Media
from lightrft.records.columns import COLUMNS
from lightrft.records.rollout import AnsweredCall, ScoredRollout
from lightrft.records.sample_ledger import SampleEntry, SampleLedger
from lightrft.records.table import BRANCH_STEP, RowTable, build_table, row_table
from lightrft.rewards.types import UNDECIDED, RewardResult
from lightrft.rollout.ledger_records import Evidence, LedgerError, SampleRecord
from lightrft.rollout.open_groups import NOTHING_OPEN, StreamState
from lightrft.rollout.source import UNKNOWN, InFlight, Samples, Selection, StreamReport
from lightrft.strategy.distributed.context import DistributedContext

_MODULUS = 2**61 - 1
_SELECTED = ("rows", "is_filler")
_FLAGS = ("has_failed", "is_abandoned", "is_filler", "is_dismissed", "lacks_baseline")


@dataclass(frozen=True, slots=True)
class _StoredTable:
    """A `RowTable` with all values as numbers, in row-major order."""

    component_names: tuple[str, ...]
    columns: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, table: RowTable) -> Self:
        return cls(table.component_names, _numbers(table.columns))

    def table(self, world_size: int) -> RowTable:
        """Return the rows as a table held by `world_size` ranks."""
        like = row_table(())
        columns = {
            name: np.array(values, COLUMNS[name].dtype if name in COLUMNS else like[name].dtype)
            for name, values in self.columns.items()
        }
        shape = (len(columns["sample_ids"]), len(self.component_names))
        columns["components"] = columns["components"].reshape(shape)
        columns["holders"] = columns["holders"] % world_size
        return build_table(RowTable, self.component_names, columns)


@dataclass(frozen=True, slots=True)
class _Note:
    """Stored form of a `SampleEntry`."""

    group_id: int
    request_id: int
    prompt: Prompt | None
    rewards: Mapping[str, RewardResult]
    scored: tuple[str, ...]
    penalty: float | None
    flags: Mapping[str, bool]
    fault: str

    @classmethod
    def of(cls, entry: SampleEntry) -> Self:
        flags = {name: getattr(entry, name) for name in _FLAGS}
        # Texts and columns are compared by identity, which files do not keep, so compare them now.
        return cls(
            entry.group_id,
            entry.request_id,
            entry.prompt,
            dict(entry.rewards),
            tuple(sorted(entry.scored)),
            entry.penalty,
            flags,
            entry.problem,
        )

    def entry(self) -> SampleEntry:
        """Return the ledger entry for the continued run."""
        return SampleEntry(
            self.group_id,
            self.prompt,
            request_id=self.request_id,
            rewards={
                source: UNDECIDED if math.isnan(result.reward) else result
                for source, result in self.rewards.items()
            },
            scored=set(self.scored),
            penalty=self.penalty,
            fault=self.fault,
            **{name: self.flags[name] for name in _FLAGS},  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True)
class _StoredSamples:
    """One rank's part of `Samples`; only the first rank stores what all ranks know."""

    scored: tuple[ScoredRollout, ...]
    num_prompts: int
    num_rounds: int
    table: _StoredTable | None
    greedy: _StoredTable | None
    selection: Mapping[str, tuple[float, ...]] | None
    report: StreamReport | None
    tool_names: tuple[str, ...] | None
    is_proved: bool
    special_ids: tuple[int, ...] = ()
    notes: Mapping[str, _Note] = field(default_factory=dict)
    greedy_notes: Mapping[str, _Note] = field(default_factory=dict)
    entries: tuple[LedgerEntry, ...] = ()
    agent_counts: tuple[Mapping[str, int], ...] | None = None
    groups: tuple[GroupResult, ...] = ()

    @classmethod
    def of(cls, samples: Samples, rank: int) -> Self:
        """Return the part of rank `rank`."""
        evidence = samples.evidence
        selection, greedy = samples.selection, samples.greedy
        stored = cls(
            tuple(samples.scored),
            samples.num_prompts,
            samples.num_rounds,
            _StoredTable.of(samples.table),
            None if greedy is None else _StoredTable.of(greedy),
            None
            if selection is None
            else _numbers({name: getattr(selection, name) for name in Selection.__slots__}),
            samples.report,
            samples.tool_names,
            evidence is not None,
            agent_counts=None if samples.agent_counts is None else tuple(samples.agent_counts),
            groups=samples.groups,
        )
        if rank > 0:
            stored = replace(stored, table=None, greedy=None, selection=None, groups=())
        if evidence is None:
            return stored
        sample_ids = {item.rollout.sample_id for item in samples.scored}
        ledger = evidence.ledger
        calls = {
            (segment.request_id, segment.sample_index)
            for i in sample_ids
            for segment in evidence.accounts[i].segments
        }
        return replace(
            stored,
            special_ids=tuple(sorted(evidence.special_ids)),
            notes={str(i): _Note.of(each) for i, each in ledger.entries.items() if i in sample_ids},
            greedy_notes={str(i): _Note.of(e) for i, e in ledger.greedy.entries.items()},
            entries=tuple(e for e in evidence.entries.values() if e.key[:2] in calls),
        )


def _numbers(values: Mapping[str, ArrayLike]) -> dict[str, tuple[float, ...]]:
    """Return arrays and numbers by name as flat numbers."""
    return {
        name: tuple(np.ravel(each).astype(np.float64).tolist()) for name, each in values.items()
    }


def _selection(values: Mapping[str, Sequence[float]]) -> Selection:
    counts = {name: int(each[0]) for name, each in values.items() if name not in _SELECTED}
    rows: NDArray[np.int64] = np.array(values["rows"], np.int64)
    return Selection(rows=rows, is_filler=np.array(values["is_filler"], np.bool_), **counts)


def _joined(
    parts: Sequence[_StoredSamples], own: Sequence[_StoredSamples], world_size: int
) -> Samples:
    """Merge the parts that one rank holds into its samples of a step."""
    first = parts[0]
    if first.table is None:
        raise ValueError("the first rank's rows have no table")
    agent_counts = None
    if first.agent_counts is not None:
        agent_counts = [counts for part in own for counts in part.agent_counts or ()]
    return Samples(
        [item for part in own for item in part.scored],
        _with_places(first.table.table(world_size), parts),
        first.num_prompts,
        first.num_rounds,
        None if first.greedy is None else first.greedy.table(world_size),
        None if first.selection is None else _selection(first.selection),
        first.report,
        _evidence(first, own) if first.is_proved else None,
        first.tool_names,
        agent_counts,
        groups=first.groups,
    )


def _with_places(table: RowTable, parts: Sequence[_StoredSamples]) -> RowTable:
    """Return the table with the places of the prompts, which older versions did not store."""
    if "prompt_places" in table.facts:
        return table
    rollouts = [item.rollout for part in parts for item in part.scored]
    ids = {each.sample_id: each.prompt.id for each in rollouts}
    places = np.array([ids[i] for i in table.sample_ids.tolist()], np.int64)
    return replace(table, facts={**table.facts, "prompt_places": places})


def _evidence(first: _StoredSamples, own: Sequence[_StoredSamples]) -> Evidence:
    ledger = SampleLedger()
    for part in own:
        ledger.entries.update({int(i): note.entry() for i, note in part.notes.items()})
        greedy = {int(i): note.entry() for i, note in part.greedy_notes.items()}
        ledger.greedy.entries.update(greedy)
    rollouts = [item.rollout for part in own for item in part.scored]
    return Evidence(
        {rollout.sample_id: SampleRecord.of(rollout, ledger) for rollout in rollouts},
        {entry.key: entry for part in own for entry in part.entries},
        frozenset(first.special_ids),
        ledger=ledger,
    )


def check_balance(
    before: InFlight,
    after: InFlight,
    drawn: Sequence[Samples],
    trained: Samples,
    *,
    group_size: int,
    context: DistributedContext,
) -> int:
    """Return the balance after a step; collective.

    Args:
        before, after: Rows in flight before and after the step.
        drawn: Samples that the step drew.
        trained: Samples that the step trains on.
        group_size: Number of samples per prompt.
        context: Context that gathers the sums of all ranks.

    Raises:
        LedgerError: Requested samples are trained twice or lost; raised on every rank.
    """
    ledgers = [each.evidence.ledger for each in (trained, *drawn, *after.held) if each.evidence]
    if before.balance == UNKNOWN or len(ledgers) < 1 + len(drawn) + len(after.held):
        return UNKNOWN
    left_out = sum(
        _sum(each, group_size, is_dismissed=True) for each in ledgers[1 : 1 + len(drawn)]
    )
    done = left_out + _sum(ledgers[0], group_size)
    kept = sum(_sum(each, group_size) for each in ledgers[1 + len(drawn) :])
    for group in after.stream.groups:
        kept += sum(_mixed(group.request_id, index) for index in range(len(group.samples)))
    sums: list[tuple[int, int]] = context.gather_objects((done, kept))
    asked = range(before.num_requests, after.num_requests)
    balance = before.balance + sum(_mixed(i, index) for i in asked for index in range(group_size))
    balance = (balance - sum(each for each, _ in sums)) % _MODULUS
    if balance != sum(each for _, each in sums) % _MODULUS:
        raise LedgerError(
            "ledger gate: of the samples that were asked for some are trained twice or are lost "
            "between steps; nothing was trained. Report this: it is a bug in lightrft; "
            "--no_ledger_gate trains all the same"
        )
    return balance


def _sum(ledger: SampleLedger, group_size: int, *, is_dismissed: bool = False) -> int:
    """Sum over this rank's dismissed samples, or over the others."""
    return sum(
        _mixed(entry.request_id, sample_id % group_size)
        for sample_id, entry in ledger.entries.items()
        if entry.is_dismissed == is_dismissed and sample_id < BRANCH_STEP
    )


def _mixed(request_id: int, index: int) -> int:
    return hash((request_id, index)) % _MODULUS


@dataclass(frozen=True, slots=True)
class _RankPart:
    """The rows of one rank.

    Args:
        held, stream, balance: Fields of `InFlight`; their prompts have no media.
        media: Digests of the prompts' media by prompt id.
    """

    held: tuple[_StoredSamples, ...] = ()
    stream: StreamState = NOTHING_OPEN
    balance: int = UNKNOWN
    # A field of older checkpoints, from partial rollouts; only an empty one can be continued.
    groups: tuple[None, ...] = ()
    media: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_prompts(self, change: Callable[[Prompt], Prompt]) -> _RankPart:
        """Return a copy with `change` applied to each prompt."""

        def of_notes(notes: Mapping[str, _Note]) -> dict[str, _Note]:
            return {
                i: note if note.prompt is None else replace(note, prompt=change(note.prompt))
                for i, note in notes.items()
            }

        def of_samples(samples: _StoredSamples) -> _StoredSamples:
            scored = tuple(
                replace(item, rollout=replace(item.rollout, prompt=change(item.rollout.prompt)))
                for item in samples.scored
            )
            notes, greedy = of_notes(samples.notes), of_notes(samples.greedy_notes)
            return replace(samples, scored=scored, notes=notes, greedy_notes=greedy)

        groups = tuple(replace(g, prompt=change(g.prompt)) for g in self.stream.groups)
        stream = replace(self.stream, groups=groups)
        return replace(self, held=tuple(map(of_samples, self.held)), stream=stream)

    def seeing(self, media: Mapping[int, Media]) -> _RankPart:
        """Return a copy whose prompts have their media.

        Raises:
            ValueError: The media differ from those that the rows were sampled with.
        """

        def change(prompt: Prompt) -> Prompt:
            wanted, current = self.media.get(str(prompt.id)), media.get(prompt.id, Media())
            if wanted is not None and wanted != _digests(current):
                raise ValueError(
                    f"the images of prompt {prompt.id} are others than they were, or the trainer "
                    "was made without the data loader that has them"
                )
            return replace(prompt, media=current if wanted else prompt.media)

        return self.with_prompts(change) if self.media else self


def to_bytes(flight: InFlight, rank: int) -> bytes:
    """Serialize the rows of one rank for a checkpoint."""
    digests: dict[str, tuple[str, ...]] = {}

    def without_media(prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        prompt_digests = _digests(prompt.media)
        if digests.setdefault(str(prompt.id), prompt_digests) != prompt_digests:
            raise ValueError(f"two prompts in flight have the id {prompt.id}, and other images")
        return replace(prompt, media=Media())

    held = tuple(_StoredSamples.of(samples, rank) for samples in flight.held)
    part = _RankPart(held, flight.stream, flight.balance).with_prompts(without_media)
    return json.dumps(asdict(replace(part, media=digests))).encode()


def bytes_of_ranks(flight: InFlight, context: DistributedContext) -> list[bytes]:
    """Return the rows of all ranks, complete on the first rank; collective."""
    rows = to_bytes(flight, context.rank)
    return context.exchange_bytes([rows, *[b""] * (context.world_size - 1)])


def _digests(media: Media) -> tuple[str, ...]:
    return tuple(f"{kind} {medium.digest}" for kind in media.kinds for medium in media[kind])


def from_parts(
    parts: Sequence[bytes],
    num_requests: int,
    *,
    rank: int,
    world_size: int,
    media: Mapping[int, Media] | None = None,
) -> InFlight:
    """Return the rows of one rank from the parts that all ranks wrote.

    Args:
        parts: Texts of `to_bytes` by rank.
        num_requests: Number of requests so far, as in `InFlight`.
        rank, world_size: This rank, and the number of ranks.
        media: Media by prompt id; the parts hold only their digests.

    Raises:
        ValueError: A part cannot be parsed, or the media differ.
    """
    # Imported here: a checkpoint is written without them.
    from lightrft.engines.media.sources import FileSource, ImageSource, VideoSource

    # The types of the records determine how checkpoints are parsed.
    type_hints(Media, FileSource=FileSource, VideoSource=VideoSource)
    for record in (AnsweredCall, LaterImages):
        type_hints(record, ImageSource=ImageSource)
    try:
        read = [typed(_RankPart, parse_json(p, "they"), "they", skips_unknown=True) for p in parts]
        loaded = [part.seeing(media or {}) for part in read]
        held = [
            _joined(batch, batch[rank::world_size], world_size)
            for batch in zip(*(part.held for part in loaded), strict=True)
        ]
        streams = [part.stream for part in loaded[rank::world_size]]
        groups = sorted((g for each in streams for g in each.groups), key=lambda g: g.request_id)
        stream = replace(
            loaded[0].stream,
            groups=tuple(groups),
            entries=tuple(entry for each in streams for entry in each.entries),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"the checkpoint's rows in flight cannot be read: {error}; start anew, or load it "
            "with load_module_only"
        ) from error
    return InFlight(num_requests, tuple(held), stream, loaded[0].balance)
