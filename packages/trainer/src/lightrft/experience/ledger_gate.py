"""Ledger gate: each trained token was sampled by the engine, and has the reward it earned.

The rows to train on are compared, bit for bit, with rows rebuilt from sources that no other stage
touches. The engine's adapter writes its ledger before anyone sees a completion. The ledger of
samples holds prompts, answers and rewards as they arise. The journal holds each sample's calls of
the engine and the observations appended to it. Entries are keyed by the hash of their context: a
token counts only in the context it was sampled in, and a reward only for the tokens it scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightrft.engines.ledger import LedgerEntry, hash_context
from lightrft.engines.types import SamplingParams
from lightrft.models.layout import LayoutPolicy, TokenLayout
from lightrft.models.support import SamplingSupport
from lightrft.records.batch import RolloutBatch
from lightrft.records.columns import COLUMNS, Values, vouched_columns
from lightrft.records.rollout import TurnSegment
from lightrft.records.table import RowTable, SampleTable
from lightrft.rollout.ledger_records import (
    CallEnd,
    Evidence,
    LedgerError,
    RowFacts,
    component_facts,
    rows_hash,
    vouched_values,
)

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


@dataclass(frozen=True, slots=True)
class RebuiltRow:
    """Row rebuilt from the evidence.

    Args:
        token_ids: [length] int64.
        turns: [length] int64, number of the call that sampled the token; -1 if none did.
        versions: [length] int64 of the weights; -1 for tokens that were not sampled.
        vouched: [length] values of the columns that the ledger holds.
        ends: For each turn its sampling parameters and finish reason.
    """

    token_ids: NDArray[np.int64]
    turns: NDArray[np.int64]
    versions: NDArray[np.int64]
    vouched: Mapping[str, Values]
    ends: Sequence[CallEnd] = ()


FOUND_OTHERWISE = ("vouched", "temperature", "support")


@dataclass(frozen=True, slots=True)
class HostRows:
    """Parts of a batch to compare, copied to host memory at once."""

    sample_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    rewards: NDArray[np.float32]
    token_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    response_mask: NDArray[np.bool_]
    compared_mask: NDArray[np.bool_]
    vouched: Mapping[str, Values]
    temperature: float
    support: SamplingSupport | None

    @classmethod
    def of(cls, batch: RolloutBatch) -> HostRows:
        """Copy the parts from a batch on any device."""
        values = {"rollout_logprobs": batch.rollout_logprobs, **batch.facts}
        if batch.compared_mask is None:
            batch = replace(batch, compared_mask=torch.zeros_like(batch.response_mask))
        names = [item.name for item in fields(cls) if item.name not in FOUND_OTHERWISE]
        return cls(
            **{name: getattr(batch, name).cpu().numpy() for name in names},
            temperature=batch.temperature,
            support=batch.support,
            vouched={
                column.name: values[column.name].cpu().numpy() for column in vouched_columns()
            },
        )


def check_ledger(
    batch: RolloutBatch,
    table: SampleTable,
    evidence: Evidence,
    step: tuple[RowTable, RowTable | None],
    *,
    policy: LayoutPolicy,
    slices: Sequence[slice],
    context: DistributedContext,
) -> None:
    """Raise unless every row to train on agrees with journal and ledgers; collective.

    Args:
        batch: This rank's rows.
        table: Table of these rows, in their order, with their versions.
        evidence: Evidence on these rows.
        step: Rows of all ranks, from which advantages are computed, and their greedy samples or
            None.
        policy: Layout policy of the actor.
        slices: Rows of each forward pass.
        context: Process groups of the ranks.

    Raises:
        LedgerError: They differ; raised on every rank, with sample, turn and token.
    """
    problem = evidence.problem
    try:
        _check_repeated(step[0])
        _check_facts(_facts(table), {i: each.facts for i, each in evidence.accounts.items()})
        host_rows = HostRows.of(batch)
        rows = [_check_row(host_rows, table, row, evidence) for row in range(len(table))]
    except LedgerError as error:
        rows, problem = [], problem or str(error)
    everything = [{} if each is None else _facts(each) for each in step]
    is_other = sum(map(rows_hash, everything)) != evidence.total
    reports: list[tuple[str, bool]] = context.gather_objects((problem, is_other))
    problems = [text for text, _ in reports]
    if not any(problems):
        # The layout of shared sequences is a collective: every rank has sound rows here.
        try:
            if any(is_other for _, is_other in reports):
                noted_rows = context.gather_objects(evidence.noted_rows())
                _check_everything(everything, noted_rows, is_other=is_other)
            else:
                for part in slices:
                    _check_layout(batch, policy, part, rows[part])
        except LedgerError as error:
            problem = str(error)
        problems = context.gather_objects(problem)
    messages = [text for text in problems if text]
    if messages:
        raise LedgerError(
            f"ledger gate: {messages[0]}\n  what is about to be trained on is not what was sampled "
            "and scored; nothing was trained. Report this: it is a fault of the program, or of an "
            "own part of it; --no_ledger_gate trains all the same"
        )


def _check_repeated(table: RowTable) -> None:
    ids, counts = np.unique(table.sample_ids, return_counts=True)
    if len(ids) < len(table):
        raise LedgerError(f"samples {ids[counts > 1][:10].tolist()} are about to be trained twice")


def rebuild(sample_id: int, evidence: Evidence) -> RebuiltRow:
    """Return a sample's row, built from journal and ledger alone.

    Raises:
        LedgerError: A call is in no ledger, or an observation holds special tokens in its text.
    """
    account = evidence.accounts.get(sample_id)
    if account is None:
        raise LedgerError(f"sample {sample_id} is in no journal")
    ids = np.array(account.prompt, dtype=np.int64)
    parts, ends = [_part(account.prompt)], list[CallEnd]()
    for turn, segment in enumerate(account.segments):
        key = (segment.request_id, segment.sample_index, hash_context(ids))
        entry = evidence.entries.get(key)
        if entry is None:
            raise LedgerError(
                f"sample {sample_id}, turn {turn}: no engine sampled request "
                f"{segment.request_id} after these {len(ids)} tokens, which end with "
                f"{ids[-8:].tolist()}"
            )
        _check_observation(sample_id, turn, segment, evidence.special_ids)
        parts += [_part(entry.token_ids, turn, entry), _part(segment.observation)]
        ends.append((entry.sampling, entry.finish_reason))
        further = np.array((*entry.token_ids, *segment.observation), dtype=np.int64)
        ids = np.concatenate([ids, further])
    row = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return RebuiltRow(ids, row.pop("turns"), row.pop("versions"), row, ends)


def _part(
    token_ids: Sequence[int], turn: int = -1, entry: LedgerEntry | None = None
) -> dict[str, NDArray[Any]]:
    """Return the columns of some tokens; without an entry they were not sampled."""
    count = len(token_ids)
    version, columns = -1 if entry is None else entry.weights_version, vouched_columns()
    vouched = {c.name: np.full(count, c.fill, c.dtype) for c in columns}
    if entry is not None:
        vouched = {c.name: vouched_values(entry, c) for c in columns}
    return {"turns": np.full(count, turn), "versions": np.full(count, version), **vouched}


def _check_observation(
    sample_id: int, turn: int, segment: TurnSegment, special: frozenset[int]
) -> None:
    for start, stop in segment.text_spans:
        forged = [i for i in segment.observation[start:stop] if i in special]
        if forged:
            raise LedgerError(
                f"sample {sample_id}, turn {turn}: the text of an observation holds the special "
                f"tokens {forged[:8]}, as if somebody else spoke"
            )


def _facts(table: RowTable) -> dict[int, RowFacts]:
    """Return the facts that ledgers note about samples, taken from rows."""
    columns = {name: table[name].tolist() for name, c in COLUMNS.items() if c.noted is not None}
    names, components = table.component_names, table.components.tolist()
    return {
        sample_id: {name: values[row] for name, values in columns.items()}
        | component_facts(dict(zip(names, components[row], strict=True)))
        for row, sample_id in enumerate(table.sample_ids.tolist())
    }


def _check_facts(
    trained: Mapping[int, RowFacts], noted: Mapping[int, RowFacts], whose: str = "sample"
) -> None:
    """Check that groups, rewards and failures of rows equal those noted as they arose."""
    for sample_id, facts in trained.items():
        if not noted.get(sample_id):
            raise LedgerError(f"{whose} {sample_id} is in no ledger of samples")
        if facts != noted[sample_id]:
            _require_equal(f"{whose} {sample_id}", facts, noted[sample_id])


def _check_everything(
    trained: Sequence[dict[int, RowFacts]],
    noted: Sequence[tuple[dict[int, RowFacts], dict[int, RowFacts]]],
    *,
    is_other: bool,
) -> None:
    """Check the rows of all ranks, and the greedy samples, against the notes of all ranks."""
    for facts_by_id, by_rank, whose in zip(
        trained, zip(*noted, strict=True), ("sample", "greedy sample of group"), strict=True
    ):
        _check_facts(
            facts_by_id, {i: facts for notes in by_rank for i, facts in notes.items()}, whose
        )
    if is_other:
        raise LedgerError("samples that were written down are missing among the rows of all ranks")


def _require_equal(
    whose: str, trained: Mapping[str, object], written: Mapping[str, object]
) -> None:
    for name in {**written, **trained}:
        actual, expected = trained.get(name), written.get(name)
        if actual != expected:
            raise LedgerError(
                f"{whose}: {name} differ: {expected} was written down as it arose, {actual} is "
                "about to be trained on"
            )


def _check_row(batch: HostRows, table: SampleTable, row: int, evidence: Evidence) -> RebuiltRow:
    """Check a row of tensors against the rebuilt row, and return the latter."""
    sample_id = int(table.sample_ids[row])
    if int(batch.sample_ids[row]) != sample_id:
        raise LedgerError(
            f"row {row} holds sample {int(batch.sample_ids[row])} where sample {sample_id} belongs"
        )
    right = rebuild(sample_id, evidence)
    length, is_sampled = len(right.token_ids), right.turns >= 0
    real = batch.attention_mask[row]
    num_real = int(real.sum())
    shared = min(length, num_real)
    ids = batch.token_ids[row]
    _compare("token ids", ids[:shared], right.token_ids[:shared], sample_id, right)
    if num_real != length or not real[:length].all():
        raise LedgerError(f"sample {sample_id} has {num_real} tokens, expected {length}")
    if any(
        scored_hash != hash_context(right.token_ids)
        for scored_hash in evidence.accounts[sample_id].scored
    ):
        raise LedgerError(f"sample {sample_id}: its reward was given to other tokens than these")
    is_left_out = bool(evidence.accounts[sample_id].facts["is_masked"])
    is_left_out |= evidence.masks_truncated and _is_cut(table, row, right)
    is_trained = is_sampled & (not is_left_out)
    mask = batch.response_mask[row]
    _compare("sampled mask", mask[:length], is_trained, sample_id, right)
    if mask[length:].any():
        raise LedgerError(f"sample {sample_id} has a mask on its padding")
    for column in vouched_columns():
        values = batch.vouched[column.name][row]
        expected = np.full(len(values), column.fill, values.dtype)
        expected[:length][is_trained] = right.vouched[column.name][is_trained]
        kind = f"u{values.itemsize}"
        _compare(f"{column.name} (bits)", values.view(kind), expected.view(kind), sample_id, right)
    versions = np.full(length, -1, dtype=np.int64)
    stop = int(table.response_lengths[: row + 1].sum())
    start = stop - int(table.response_lengths[row])
    versions[int(table.prompt_lengths[row]) :] = table.token_versions[start:stop]
    _compare("weights versions", versions, right.versions, sample_id, right)
    if all(sampling for sampling, _ in right.ends):
        compared = np.zeros(len(mask), np.bool_)
        compared[:length] = is_trained & _is_comparable(batch, right, evidence.version, sample_id)
        _compare("compared mask", batch.compared_mask[row], compared, sample_id, right)
    _require_equal(f"sample {sample_id}", *_facts_of_row(batch, table, row, evidence, right))
    return right


def _facts_of_row(
    batch: HostRows, table: SampleTable, row: int, evidence: Evidence, right: RebuiltRow
) -> tuple[dict[str, object], dict[str, object]]:
    """Return two sets of facts of a row: as trained on, and as noted."""
    sample_id = int(table.sample_ids[row])
    account = evidence.accounts[sample_id]
    noted, num_prompt = account.facts, len(account.prompt)
    names = ("prompt_lengths", "response_lengths", "sampled_lengths", "weights_versions")
    trained: dict[str, object] = {name: int(table[name][row]) for name in (*names, "is_truncated")}
    if (right.turns < 0).all():  # without sampled tokens the version is unknown
        del trained["weights_versions"]
    trained |= {"rewards": batch.rewards[row], "group_ids": batch.group_ids[row]}
    written = {
        "prompt_lengths": num_prompt,
        "response_lengths": len(right.token_ids) - num_prompt,
        "sampled_lengths": int((right.turns >= 0).sum()),
        "weights_versions": int(right.versions.max(initial=-1)),
        "is_truncated": int(_is_cut(table, row, right)),
        "rewards": np.float32(noted["rewards"]),
        "group_ids": noted["group_ids"],
    }
    return trained, {name: written[name] for name in trained}


def _is_cut(table: SampleTable, row: int, right: RebuiltRow) -> bool:
    """Return whether the token budget ended a response; by the table if its end is not noted."""
    end = right.ends[-1][1] if right.ends else "abort"
    return end == "length" if end else bool(table.is_truncated[row])


def _is_comparable(
    batch: HostRows, right: RebuiltRow, version: int, sample_id: int
) -> NDArray[np.bool_]:
    """Return [length] bool: whether the trainer scores the distribution and weights sampled from.

    Raises:
        LedgerError: The trainer scores at another temperature or another truncation. Only the first
            token of a response may have a different temperature.
    """
    is_like, support, later = [], batch.support, right.turns[right.turns >= 0][1:]
    replayed = None if support is None else (support.top_p, support.top_k, support.min_p)
    for turn, (sampling, _) in enumerate(right.ends):
        temperature, top_p, top_k, min_p = sampling
        drawn = SamplingParams(temperature, top_p, int(top_k), min_p)
        is_same = drawn.temperature == batch.temperature
        if not is_same and turn in later:
            raise LedgerError(
                f"sample {sample_id}, turn {turn}: temperature differs: it was sampled at "
                f"{drawn.temperature}, the trainer scores at {batch.temperature}"
            )
        cut = drawn.distribution[1:] if drawn.truncates else None
        if cut != replayed and None not in (cut, replayed):
            raise LedgerError(
                f"sample {sample_id}, turn {turn}: top_p, top_k and min_p differ: it was sampled "
                f"with {cut}, the trainer replays {replayed}"
            )
        is_like.append(is_same and cut == replayed)
    is_so: NDArray[np.bool_] = np.array([*is_like, False], dtype=np.bool_)
    return is_so[right.turns] & np.equal(right.versions, version)


def _compare(
    what: str,
    found: NDArray[np.generic],
    expected: NDArray[np.generic],
    sample_id: int,
    right: RebuiltRow,
) -> None:
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return
    place = int(wrong[0])
    # Tokens of prompts and observations count to the last turn before them.
    turn = int(right.turns[: place + 1].max(initial=-1))
    where = f"turn {turn}" if turn >= 0 else "prompt"
    raise LedgerError(
        f"sample {sample_id}, {where}, token {place} of {len(right.token_ids)}: {what} differ: got "
        f"{found[place]}, expected {expected[place]}"
    )


def _check_layout(
    batch: RolloutBatch, policy: LayoutPolicy, part: slice, rows: Sequence[RebuiltRow]
) -> None:
    """Check the inputs of a forward pass: ids, positions, and the scored places."""
    mask = batch.response_mask[part]
    layout = policy.lay_out(batch.token_ids[part], batch.attention_mask[part], mask)
    lengths = [len(row.token_ids) for row in rows]
    all_ids, all_positions = (x.cpu().numpy() for x in (layout.input_ids, layout.position_ids))
    if layout.bounds is None:
        pieces = [(row, slice(0, length)) for row, length in enumerate(lengths)]
        seen = [(all_ids[place], all_positions[place]) for place in pieces]
        starts = [row * mask.shape[1] for row in range(len(rows))]
        first = 0
    else:
        starts = [0, *accumulate(lengths)][: len(rows)]
        width, group = layout.input_ids.shape[1], layout.bounds.group
        first = 0 if group is None else dist.get_rank(group) * width
        if list(layout.bounds.offsets[: len(rows) + 1]) != [*starts, sum(lengths)]:
            raise LedgerError("a packed stream does not end its sequences where rows end")
        seen = [
            (all_ids[0, part_here], all_positions[0, part_here])
            for start, length in zip(starts, lengths, strict=True)
            for part_here in (slice(max(0, start - first), max(0, start + length - first)),)
        ]
    for number, (row, (ids, positions)) in enumerate(zip(rows, seen, strict=True)):
        skipped = 0 if layout.bounds is None else max(0, first - starts[number])
        expected = slice(skipped, skipped + len(ids))
        places = np.arange(expected.start, expected.stop, dtype=np.int64)
        if np.array_equal(ids, row.token_ids[expected]) and np.array_equal(positions, places):
            continue
        sample_id = int(batch.sample_ids[part][number])
        part_of = replace(row, turns=row.turns[: expected.stop])
        _compare("laid-out ids", ids, row.token_ids[expected], sample_id, part_of)
        _compare("positions", positions, places, sample_id, part_of)
    _check_scored(layout, mask.cpu().numpy(), rows, starts, first)


def _check_scored(
    layout: TokenLayout,
    mask: NDArray[np.bool_],
    rows: Sequence[RebuiltRow],
    starts: Sequence[int],
    first: int,
) -> None:
    """Check that each scored token is predicted once, from the token before it in its row."""
    token_ids = np.zeros(mask.shape, dtype=np.int64)
    for number, row in enumerate(rows):
        token_ids[number, : len(row.token_ids)] = row.token_ids
    where, columns = np.nonzero(mask)
    sources = np.array(starts, dtype=np.int64)[where] + columns - 1
    if layout.bounds is not None:
        width = layout.input_ids.shape[1]
        is_local = (sources >= first) & (sources < first + width)
        where, columns, sources = where[is_local], columns[is_local], sources[is_local]
    expected = np.stack([where, columns, token_ids[where, columns], sources - first])
    parts = (layout.rows, layout.columns, layout.targets, layout.sources)
    actual = np.stack([part.cpu().numpy() for part in parts])
    shared = min(expected.shape[1], actual.shape[1])
    wrong = np.flatnonzero((expected[:, :shared] != actual[:, :shared]).any(axis=0))
    if len(wrong) or expected.shape != actual.shape:
        place = int(wrong[0]) if len(wrong) else shared
        names = "(row, column, id, predicted from)"
        raise LedgerError(
            f"a forward pass scores other tokens than were sampled: its token {place} {names} is "
            f"{actual[:, place : place + 1].ravel().tolist()}, expected "
            f"{expected[:, place : place + 1].ravel().tolist()}"
        )
