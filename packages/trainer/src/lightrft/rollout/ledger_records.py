"""Evidence of the ledger gate: journal and ledgers, brought to the rank that trains a sample.

The journal says which calls of the engine a sample came from and which observations were appended;
the engine's ledger is what its adapter wrote, the ledger of samples what was asked and scored.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from lightrft.engines.ledger import Key, LedgerEntry
from lightrft.records.columns import COLUMNS, Column, Values, vouched_columns
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
class Account:
    """The journal of one sample.

    Args:
        prompt: Token ids of the data row's prompt.
        segments: Calls of the engine and observations, in their order.
        scored: Hashes of the ids that its rewards were given to.
        facts: What was written down of it.
    """

    prompt: tuple[int, ...]
    segments: tuple[TurnSegment, ...]
    scored: tuple[str, ...] = ()
    facts: RowFacts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Knowledge of a rank about samples, beside the samples themselves.

    Args:
        accounts: By sample id.
        entries: Of ledgers.
        special_ids: Ids that no text of an observation may have.
        version: Of the engine's weights in this step.
        ledger: Of the samples of this rank.
        total: `rows_hash` of what was written down of all ranks' samples and greedy samples.
        problem: The first contradiction in what this rank wrote down; "" is none.
        masks_truncated: Of responses that their token budget ended, no token may be trained on.
    """

    accounts: Mapping[int, Account]
    entries: Mapping[Key, LedgerEntry]
    special_ids: frozenset[int] = frozenset()
    version: int = -1
    ledger: SampleLedger = field(default_factory=SampleLedger)
    total: int = 0
    problem: str = ""
    masks_truncated: bool = False

    def noted_rows(self) -> tuple[dict[int, RowFacts], dict[int, RowFacts]]:
        """What this rank wrote down of its own samples to train on, and of its greedy ones."""
        own, greedy = self.ledger.entries, self.ledger.greedy.entries
        return (
            {i: noted_facts(entry) for i, entry in own.items() if not entry.is_dismissed},
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
    """Journal and ledgers of this rank, whose engine's ledger is emptied; collective.

    Args:
        rollouts: This rank's.
        session: Of the engine.
        ledger: Of the samples; None rebuilds rows, and proves nothing of their facts.
        special_ids: See `Evidence`.
        carried: Entries that were taken before.

    Raises:
        LedgerError: A request was sampled twice in one context, or ranks of one engine sampled
            different tokens for one request.
    """
    engine, context = session.engine, session.context
    taken = [] if engine is None else engine.ledger.take()
    entries = {entry.key: entry for entry in carried}
    _add(entries, taken)
    # The ranks of a tensor-parallel group all write what the group samples.
    group = context.engine_mp_group
    compared = [] if group is None else taken
    digests = {_digest(e.key): (_digest(e.token_ids), _digest(e)) for e in compared}
    for theirs in [] if group is None else context.gather_objects(digests, group):
        for entry in taken:
            own = digests[_digest(entry.key)]
            found = theirs.get(_digest(entry.key), own)
            if found != own:
                raise _sampled_twice(entry, has_same_tokens=found[0] == own[0])
    ledger = ledger or SampleLedger()
    _require_branches(ledger, rollouts)
    accounts = {}
    for item in rollouts:
        noted = ledger.entries.get(item.sample_id, SampleEntry())
        prompt = noted.prompt or item.prompt
        accounts[item.sample_id] = Account(prompt.token_ids, item.segments, tuple(noted.scored))
    version = -1 if engine is None else engine.weights_version
    return Evidence(accounts, entries, frozenset(special_ids), version=version, ledger=ledger)


def _require_branches(ledger: SampleLedger, rollouts: Sequence[Rollout]) -> None:
    """Raises a LedgerError if a branch that was sampled is no row."""
    branches = {sample_id for sample_id in ledger.entries if sample_id >= BRANCH_STEP}
    lost = sorted(branches - {item.sample_id for item in rollouts})
    if lost:
        raise LedgerError(f"branches of episodes are missing among the rows: samples {lost[:8]}")


def deliver_evidence(
    evidence: Evidence, wanted: Sequence[Collection[int]], context: RowExchange
) -> Evidence:
    """The evidence on the samples that this rank trains; collective.

    Args:
        evidence: Of the samples of this rank.
        wanted: Sample ids that each rank trains; the same on every rank.
        context: Brings bytes from rank to rank.

    Returns:
        Also a hash of what was written down of all that any rank trains.
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
                i: replace(evidence.accounts[i], facts=noted.get(i, {}))
                for i in ids
                if i in evidence.accounts
            },
            by_call,
        )
        for ids in wanted
    ]
    accounts: dict[int, Account] = {}
    entries: dict[Key, LedgerEntry] = {}
    total = 0
    for data in context.exchange_bytes(parts):
        part, theirs, found = _unpack(data)
        total += part
        accounts |= theirs
        _add(entries, found)
    own = evidence.ledger.entries
    problems = (f"sample {i}: {own[i].problem}" for i in sorted(noted) if own[i].problem)
    return replace(
        evidence, accounts=accounts, entries=entries, total=total, problem=next(problems, "")
    )


def noted_facts(entry: SampleEntry) -> RowFacts:
    """What was written down of a sample, by column and by component of the reward."""
    facts = {name: c.noted(entry) for name, c in COLUMNS.items() if c.noted is not None}
    return facts | component_facts(entry.components)


def component_facts(components: Mapping[str, float]) -> RowFacts:
    """Components of a reward, without those that are absent."""
    given = sorted(components.items())
    return {f"component {name}": value for name, value in given if not math.isnan(value)}


def rows_hash(rows: Mapping[int, RowFacts]) -> int:
    """A sum over rows, the same in any order and for any distribution over ranks."""
    return sum(hash((sample_id, *facts.values())) for sample_id, facts in rows.items())


def _pack(
    total: int,
    accounts: Mapping[int, Account],
    by_call: Mapping[Call, Sequence[LedgerEntry]],
) -> bytes:
    """Accounts and the entries of their calls, with values as the gate reads them."""
    calls = {(s.request_id, s.sample_index) for each in accounts.values() for s in each.segments}
    entries = [entry for call in sorted(calls) for entry in by_call.get(call, ())]
    ends: dict[CallEnd, CallEnd] = {}  # one object is sent once
    return pickle.dumps(
        (
            total,
            [
                (
                    sample_id,
                    _ids(account.prompt),
                    account.scored,
                    account.facts,
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


def vouched_values(entry: LedgerEntry, column: Column) -> Values:
    """The values of a column that an entry holds, as the ledger gate reads them."""
    facts = {"rollout_logprobs": entry.logprobs, **entry.facts}
    return np.array(
        facts.get(column.name, (column.fill,) * len(entry.token_ids)), dtype=column.dtype
    )


def _unpack(data: bytes) -> tuple[int, dict[int, Account], list[LedgerEntry]]:
    total, accounts, entries = pickle.loads(data)
    return (
        total,
        {
            sample_id: Account(
                _tuple(prompt),
                tuple(TurnSegment(i, j, _tuple(seen), spans) for i, j, seen, spans in segments),
                scored,
                facts,
            )
            for sample_id, prompt, scored, facts, segments in accounts
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
    found = "equal tokens and other log-probabilities or weights"
    return LedgerError(
        f"request {entry.request_id} was sampled twice in one context, with "
        f"{found if has_same_tokens else 'different tokens'}: the ranks of an engine disagree, or "
        "request ids repeat"
    )
