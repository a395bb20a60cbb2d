"""Evidence of the ledger gate: journal and ledgers, sent to the rank that trains a sample.

The journal says which engine calls a sample came from and which observations were appended. The
engine's adapter writes the engine's ledger. The ledger of samples holds requests and rewards.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from lightrft.engines.ledger import Key, LedgerEntry, hash_context
from lightrft.records.columns import COLUMNS, Column, Values, packed_columns, vouched_columns
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.records.sample_ledger import SampleEntry, SampleLedger
from lightrft.records.table import BRANCH_STEP
from lightrft.strategy.distributed.context import RowExchange

if TYPE_CHECKING:
    from lightrft.strategy.engine.session import EngineSession

Call = tuple[int, int]  # request id, sample index
CallEnd = tuple[tuple[float, ...], str]  # `sampling` and `finish_reason` of an entry
RowFacts = dict[str, float]  # by name of the column, or of the component


class LedgerError(RuntimeError):
    """Samples that are about to be trained on are not those of the engine."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """The journal of one sample.

    Args:
        prompt: Token ids of the data row's prompt.
        segments: Engine calls and observations, in order.
        scored: Hashes of the token ids that received rewards.
        facts: Recorded values of the sample.
        packed: Hashes of packed columns by name, from the engine's ledger.
    """

    prompt: tuple[int, ...]
    segments: tuple[TurnSegment, ...]
    scored: tuple[str, ...] = ()
    facts: RowFacts = field(default_factory=dict)
    packed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rollout: Rollout, ledger: SampleLedger) -> Self:
        """Return the journal of a rollout, whose prompt was recorded when it was requested."""
        entry = ledger.entries.get(rollout.sample_id, SampleEntry())
        prompt = entry.prompt or rollout.prompt
        return cls(prompt.token_ids, rollout.segments, tuple(entry.scored))


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that a rank has about samples, in addition to the samples.

    Args:
        accounts: Journals by sample id.
        entries: Entries of engines' ledgers by key.
        special_ids: Token ids that the text of an observation must not contain.
        version: Version of the engine's weights in this step.
        ledger: Ledger of this rank's samples.
        total: `rows_hash` of the recorded values of all ranks' samples and greedy samples.
        problem: First contradiction in this rank's records; "" if there is none.
        masks_truncated: Whether responses cut by their token budget must not be trained on.
    """

    accounts: Mapping[int, SampleRecord]
    entries: Mapping[Key, LedgerEntry]
    special_ids: frozenset[int] = frozenset()
    version: int = -1
    ledger: SampleLedger = field(default_factory=SampleLedger)
    total: int = 0
    problem: str = ""
    masks_truncated: bool = False

    def noted_rows(self) -> tuple[dict[int, RowFacts], dict[int, RowFacts]]:
        """Return recorded values of this rank's samples to train on, and of its greedy samples."""
        entries, greedy = self.ledger.entries, self.ledger.greedy.entries
        return (
            {i: noted_facts(entry) for i, entry in entries.items() if not entry.is_dismissed},
            {i: noted_facts(entry) for i, entry in greedy.items()},
        )


def take_evidence(
    rollouts: Sequence[Rollout],
    session: EngineSession,
    *,
    ledger: SampleLedger | None = None,
    special_ids: Collection[int] = (),
    carried: Iterable[LedgerEntry] = (),
) -> Evidence:
    """Return this rank's journal and ledgers, and empty the engine's ledger; collective.

    Args:
        rollouts: Rollouts of this rank.
        session: Session of the engine.
        ledger: Ledger of the samples; without it, recorded values cannot be checked.
        special_ids: Special token ids, as in `Evidence`.
        carried: Entries taken in earlier steps.

    Raises:
        LedgerError: A request was sampled twice in one context, or ranks of one engine sampled
            different tokens for one request.
    """
    engine, context = session.engine, session.context
    taken = [] if engine is None else engine.ledger.take()
    entries = {entry.key: entry for entry in carried}
    _add(entries, taken)
    # All ranks of a tensor-parallel group record what the group samples.
    group = context.engine_mp_group
    compared = [] if group is None else taken
    digests = {_digest(e.key): (_digest(e.token_ids), _digest(e)) for e in compared}
    for theirs in [] if group is None else context.gather_objects(digests, group):
        for entry in taken:
            local = digests[_digest(entry.key)]
            remote = theirs.get(_digest(entry.key), local)
            if remote != local:
                raise _sampled_twice(entry, has_same_tokens=remote[0] == local[0])
    ledger = ledger or SampleLedger()
    _require_branches(ledger, rollouts)
    accounts = {item.sample_id: SampleRecord.of(item, ledger) for item in rollouts}
    version = -1 if engine is None else engine.weights_version
    return Evidence(accounts, entries, frozenset(special_ids), version=version, ledger=ledger)


def _require_branches(ledger: SampleLedger, rollouts: Sequence[Rollout]) -> None:
    """Raise a LedgerError if a sampled branch is missing among the rows."""
    branches = {sample_id for sample_id in ledger.entries if sample_id >= BRANCH_STEP}
    lost = sorted(branches - {item.sample_id for item in rollouts})
    if lost:
        raise LedgerError(f"branches of episodes are missing among the rows: samples {lost[:8]}")


def deliver_evidence(
    evidence: Evidence, wanted: Sequence[Collection[int]], context: RowExchange
) -> Evidence:
    """Exchange evidence, so that each rank has it for the samples it trains; collective.

    Args:
        evidence: Evidence on the samples of this rank.
        wanted: Sample ids by the rank that trains them; equal on all ranks.
        context: Exchange of bytes between ranks.

    Returns:
        Evidence that also has a hash of all ranks' recorded values.
    """
    noted, greedy = evidence.noted_rows()
    total = rows_hash(noted) + rows_hash(greedy)
    by_call: dict[Call, list[LedgerEntry]] = {}
    for entry in evidence.entries.values():
        by_call.setdefault(entry.key[:2], []).append(entry)
    parts = [
        _pack(
            total,
            {
                i: replace(
                    evidence.accounts[i],
                    facts=noted.get(i, {}),
                    packed=_packed_hashes(evidence.accounts[i], evidence.entries),
                )
                for i in ids
                if i in evidence.accounts
            },
            by_call,
        )
        for ids in wanted
    ]
    accounts: dict[int, SampleRecord] = {}
    entries: dict[Key, LedgerEntry] = {}
    total = 0
    for data in context.exchange_bytes(parts):
        part, theirs, more = _unpack(data)
        total += part
        accounts |= theirs
        _add(entries, more)
    samples = evidence.ledger.entries
    problems = (f"sample {i}: {samples[i].problem}" for i in sorted(noted) if samples[i].problem)
    return replace(
        evidence, accounts=accounts, entries=entries, total=total, problem=next(problems, "")
    )


def noted_facts(entry: SampleEntry) -> RowFacts:
    """Return recorded values of a sample by column and by reward component."""
    facts = {name: c.noted(entry) for name, c in COLUMNS.items() if c.noted is not None}
    return facts | component_facts(entry.components)


def component_facts(components: Mapping[str, float]) -> RowFacts:
    """Return the components of a reward that are not NaN."""
    items = sorted(components.items())
    return {f"component {name}": value for name, value in items if not math.isnan(value)}


def rows_hash(rows: Mapping[int, RowFacts]) -> int:
    """Return a sum of hashes that does not depend on the order or placement of rows."""
    return sum(hash((sample_id, *facts.values())) for sample_id, facts in rows.items())


def _pack(
    total: int,
    accounts: Mapping[int, SampleRecord],
    by_call: Mapping[Call, Sequence[LedgerEntry]],
) -> bytes:
    """Serialize accounts and the entries of their calls, with the values that the gate reads."""
    calls = {(s.request_id, s.sample_index) for each in accounts.values() for s in each.segments}
    entries = [entry for call in sorted(calls) for entry in by_call.get(call, ())]
    ends: dict[CallEnd, CallEnd] = {}  # pickle sends an identical object only once
    return pickle.dumps(
        (
            total,
            [
                (
                    sample_id,
                    _ids(account.prompt),
                    account.scored,
                    account.facts,
                    account.packed,
                    [
                        (s.request_id, s.sample_index, _ids(s.observation), s.text_spans)
                        for s in account.segments
                    ],
                )
                for sample_id, account in accounts.items()
            ],
            [
                (
                    entry.key,
                    entry.weights_version,
                    _ids(entry.token_ids),
                    ends.setdefault(end := (entry.sampling, entry.finish_reason), end),
                    *(
                        column.to_wire(vouched_values(entry, column))
                        for column in vouched_columns()
                    ),
                )
                for entry in entries
            ],
        )
    )


def _packed_hashes(account: SampleRecord, entries: Mapping[Key, LedgerEntry]) -> dict[str, str]:
    """Return the hashes of a sample's packed columns, from the ledger; {} if calls are missing."""
    if not packed_columns():
        return {}
    ids, versions = list(account.prompt), list[int]()
    facts: dict[str, list[str]] = {column.name: [] for column in packed_columns()}
    for segment in account.segments:
        entry = entries.get((segment.request_id, segment.sample_index, hash_context(ids)))
        if entry is None:  # the gate says so
            return {}
        num_seen = len(segment.observation)
        for name, values in facts.items():
            empty = ("",) * len(entry.token_ids)
            values += [*map(str, entry.facts.get(name, empty)), *("",) * num_seen]
        versions += [entry.weights_version] * len(entry.token_ids) + [-1] * num_seen
        ids += [*entry.token_ids, *segment.observation]
    return {
        column.name: hash_values(column.pack(len(account.prompt), facts[column.name], versions))
        for column in packed_columns()
        if column.pack is not None
    }


def hash_values(values: Values) -> str:
    """Return a 64-bit hash of the bytes of values, as hexadecimal digits."""
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


def vouched_values(entry: LedgerEntry, column: Column) -> Values:
    """Return an entry's values of a column, as the ledger gate reads them."""
    facts = {"rollout_logprobs": entry.logprobs, **entry.facts}
    return np.array(
        facts.get(column.name, (column.fill,) * len(entry.token_ids)), dtype=column.dtype
    )


def _unpack(data: bytes) -> tuple[int, dict[int, SampleRecord], list[LedgerEntry]]:
    total, accounts, entries = pickle.loads(data)
    return (
        total,
        {
            sample_id: SampleRecord(
                _tuple(prompt),
                tuple(TurnSegment(i, j, _tuple(seen), spans) for i, j, seen, spans in segments),
                scored,
                facts,
                packed,
            )
            for sample_id, prompt, scored, facts, packed, segments in accounts
        },
        [_entry(*values) for values in entries],
    )


def _entry(key: Key, version: int, ids: bytes, end: CallEnd, *columns: bytes) -> LedgerEntry:
    token_ids = _tuple(ids)
    facts = {
        column.name: tuple(column.from_wire(memoryview(data), len(token_ids))[0].tolist())
        for column, data in zip(vouched_columns(), columns, strict=True)
    }
    logprobs = facts.pop("rollout_logprobs")
    return LedgerEntry(*key, token_ids, logprobs, version, facts, *end)


def _ids(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def _tuple(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, np.int32).tolist())


def _add(entries: dict[Key, LedgerEntry], more: Iterable[LedgerEntry]) -> None:
    for entry in more:
        before = entries.setdefault(entry.key, entry)
        if before != entry:
            raise _sampled_twice(entry, has_same_tokens=before.token_ids == entry.token_ids)


def _digest(item: object) -> bytes:
    return hashlib.blake2b(repr(item).encode(), digest_size=8).digest()


def _sampled_twice(entry: LedgerEntry, *, has_same_tokens: bool) -> LedgerError:
    text = "equal tokens and other log-probabilities or weights"
    return LedgerError(
        f"request {entry.request_id} was sampled twice in one context, with "
        f"{text if has_same_tokens else 'different tokens'}: the ranks of an engine disagree, or "
        "request ids repeat"
    )
