"""Evidence of the ledger gate: journal and ledger, brought to the rank that trains a sample.

The journal says which prompt a sample answers, which calls of the engine it came from and which
observations were appended; the ledger is what the engine's adapter wrote.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lightrft.engines.ledger import Key, LedgerEntry
from lightrft.records.columns import Column, Values, vouched_columns
from lightrft.records.rollout import Rollout, Segment
from lightrft.strategy.distributed.context import DistributedContext

if TYPE_CHECKING:
    from lightrft.strategy.engine.session import EngineSession

Call = tuple[int, int]  # request id, sample index


class LedgerError(RuntimeError):
    """Samples that are about to be trained on are not those of the engine."""


@dataclass(frozen=True, slots=True)
class Account:
    """The journal of one sample.

    Args:
        prompt: Token ids of the data row's prompt.
        segments: Calls of the engine and observations, in their order.
    """

    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Knowledge of a rank about samples, beside the samples themselves.

    Args:
        accounts: By sample id.
        entries: Of ledgers.
        special_ids: Ids that no text of an observation may have.
        is_shared: Every rank has the entries of all ranks.
    """

    accounts: Mapping[int, Account]
    entries: Mapping[Key, LedgerEntry]
    special_ids: frozenset[int] = frozenset()
    is_shared: bool = False


def take_evidence(
    rollouts: Sequence[Rollout], session: EngineSession, *, special_ids: Collection[int] = ()
) -> Evidence:
    """Journal and ledger of this rank, whose engine's ledger is emptied; collective.

    Args:
        rollouts: This rank's.
        session: Of the engine.
        special_ids: See `Evidence`.

    Raises:
        LedgerError: Ranks of one engine sampled different tokens for one request.
    """
    engine, context = session.engine, session.context
    taken = [] if engine is None else engine.ledger.take()
    entries: dict[Key, LedgerEntry] = {}
    _add(entries, taken)
    digests = {_digest(entry.key): _digest(entry) for entry in taken}
    # The ranks of a tensor-parallel group all write what the group samples.
    group = context.engine_mp_group
    for theirs in [] if group is None else context.gather_objects(digests, group):
        odd = [
            entry for entry in taken if theirs.get(_digest(entry.key)) not in (None, _digest(entry))
        ]
        if odd:
            raise _sampled_twice(odd[0])
    accounts = {item.sample_id: Account(item.prompt.token_ids, item.segments) for item in rollouts}
    return Evidence(accounts, entries, frozenset(special_ids))


def share_entries(
    evidence: Evidence, carried: Sequence[LedgerEntry], context: DistributedContext
) -> Evidence:
    """The evidence with the entries of all ranks; collective.

    Args:
        evidence: Of this rank.
        carried: Entries of earlier steps, the same on every rank.
        context: Gathers.

    Raises:
        LedgerError: A request was sampled twice in one context.
    """
    entries = {entry.key: entry for entry in carried}
    for theirs in context.gather_objects(list(evidence.entries.values())):
        _add(entries, theirs)
    return replace(evidence, entries=entries, is_shared=True)


def deliver_evidence(
    evidence: Evidence, wanted: Sequence[Collection[int]], context: DistributedContext
) -> Evidence:
    """The evidence on the samples that this rank trains; collective.

    Args:
        evidence: Of the samples of this rank.
        wanted: Sample ids that each rank trains; the same on every rank.
        context: Brings bytes from rank to rank.
    """
    by_call: dict[Call, list[LedgerEntry]] = {}
    for entry in () if evidence.is_shared else evidence.entries.values():
        by_call.setdefault(entry.key[:2], []).append(entry)
    parts = [
        _pack({i: evidence.accounts[i] for i in ids if i in evidence.accounts}, by_call)
        for ids in wanted
    ]
    accounts: dict[int, Account] = {}
    entries = dict(evidence.entries) if evidence.is_shared else {}
    for data in context.exchange_bytes(parts):
        if data:
            theirs, found = _unpack(data)
            accounts |= theirs
            _add(entries, found)
    return replace(evidence, accounts=accounts, entries=entries)


def _pack(accounts: Mapping[int, Account], by_call: Mapping[Call, Sequence[LedgerEntry]]) -> bytes:
    """Accounts and the entries of their calls, with values as the gate reads them."""
    if not accounts:
        return b""
    calls = {(s.request_id, s.sample_index) for each in accounts.values() for s in each.segments}
    entries = [entry for call in sorted(calls) for entry in by_call.get(call, ())]
    return pickle.dumps(
        (
            [
                (
                    sample_id,
                    _ids(account.prompt),
                    [
                        (s.request_id, s.sample_index, _ids(s.observation), s.text_spans)
                        for s in account.segments
                    ],
                )
                for sample_id, account in accounts.items()
            ],
            [
                (
                    *entry.key,
                    entry.weights_version,
                    _ids(entry.token_ids),
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


def _unpack(data: bytes) -> tuple[dict[int, Account], list[LedgerEntry]]:
    accounts, entries = pickle.loads(data)
    return (
        {
            sample_id: Account(
                _tuple(prompt),
                tuple(Segment(i, j, _tuple(seen), spans) for i, j, seen, spans in segments),
            )
            for sample_id, prompt, segments in accounts
        },
        [_entry(*values) for values in entries],
    )


def _entry(
    request_id: int, index: int, context: str, version: int, ids: bytes, *columns: bytes
) -> LedgerEntry:
    token_ids = _tuple(ids)
    facts = {
        column.name: tuple(column.from_wire(memoryview(data), len(token_ids))[0].tolist())
        for column, data in zip(vouched_columns(), columns, strict=True)
    }
    logprobs = facts.pop("rollout_logprobs")
    return LedgerEntry(request_id, index, context, token_ids, logprobs, version, facts)


def _ids(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def _tuple(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, np.int32).tolist())


def _add(entries: dict[Key, LedgerEntry], more: Iterable[LedgerEntry]) -> None:
    for entry in more:
        if entries.setdefault(entry.key, entry) != entry:
            raise _sampled_twice(entry)


def _digest(item: object) -> bytes:
    return hashlib.blake2b(repr(item).encode(), digest_size=8).digest()


def _sampled_twice(entry: LedgerEntry) -> LedgerError:
    return LedgerError(
        f"request {entry.request_id} was sampled twice in one context, with different tokens: the "
        "ranks of an engine disagree, or request ids repeat"
    )
