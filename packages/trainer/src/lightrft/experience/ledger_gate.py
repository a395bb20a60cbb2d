"""Ledger gate: each trained token was sampled by the engine, and has the reward it earned.

The rows to train on are compared, bit for bit, with rows rebuilt from sources that no other stage
touches. The engine's adapter writes its ledger before anyone sees a completion. The ledger of
samples holds prompts, answers and rewards as they arise. The journal holds each sample's calls of
the engine and the observations appended to it. Entries are keyed by the hash of their context: a
token counts only in the context it was sampled in, and a reward only for the tokens it scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightrft.engines.ledger import LedgerEntry, hash_context
from lightrft.engines.types import ROUTES, SamplingParams
from lightrft.models.layout import LayoutPolicy, TokenLayout
from lightrft.records.batch import RolloutBatch, select_rollouts
from lightrft.records.columns import COLUMNS, Values, packed_columns, vouched_columns
from lightrft.records.rollout import TurnSegment
from lightrft.records.table import RowTable, SampleTable
from lightrft.rollout.ledger_records import (
    CallEnd,
    Evidence,
    LedgerError,
    RowFacts,
    component_facts,
    hash_values,
    rows_hash,
    vouched_values,
)

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


@dataclass(frozen=True, slots=True)
class RebuiltRow:
    """Row rebuilt from the evidence.

    Args:
        sample_id: Id of the sample.
        token_ids: [length] int64.
        turns: [length] int64, number of the call that sampled the token; -1 if none did.
        versions: [length] int64 of the weights; -1 for tokens that were not sampled.
        vouched: [length] values of the columns that the ledger holds.
        ends: For each turn its sampling parameters and finish reason.
    """

    sample_id: int
    token_ids: NDArray[np.int64]
    turns: NDArray[np.int64]
    versions: NDArray[np.int64]
    vouched: Mapping[str, Values]
    ends: Sequence[CallEnd] = ()


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
        rows = _check_rows(batch, table, evidence)
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
                    _check_layout(select_rollouts(batch, part), policy, rows[part])
        except LedgerError as error:
            problem = str(error)
        problems = context.gather_objects(problem)
    messages = [text for text in problems if text]
    if messages:
        raise LedgerError(
            f"ledger gate: {messages[0]}\n  what is about to be trained on is not what was sampled "
            "and scored; nothing was trained. Report this: it is a bug in lightrft or in one "
            "of your plug-ins; --no_ledger_gate trains all the same"
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
    parts, ends = [_part(account.prompt)], list[CallEnd]()
    for turn, segment in enumerate(account.segments):
        ids = np.concatenate([part["token_ids"] for part in parts])
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
    row = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    ids, turns, versions = (row.pop(name) for name in ("token_ids", "turns", "versions"))
    return RebuiltRow(sample_id, ids, turns, versions, row, ends)


def _part(
    token_ids: Sequence[int], turn: int = -1, entry: LedgerEntry | None = None
) -> dict[str, NDArray[Any]]:
    """Return the columns of some tokens; without an entry they were not sampled."""
    count, version = len(token_ids), -1 if entry is None else entry.weights_version
    vouched = {
        c.name: np.full(count, c.fill, c.dtype) if entry is None else vouched_values(entry, c)
        for c in vouched_columns()
    }
    ids = np.array(token_ids, dtype=np.int64)
    numbers = {"turns": np.full(count, turn), "versions": np.full(count, version)}
    return {"token_ids": ids, **numbers, **vouched}


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


def _check_rows(batch: RolloutBatch, table: SampleTable, evidence: Evidence) -> list[RebuiltRow]:
    """Check rows of tensors against rebuilt rows, and return the latter."""
    # Copied at once: the batch may lie on a GPU.
    host = {name: tensor.cpu().numpy() for name, tensor in batch.tensors.items()}
    host.setdefault("compared_mask", np.zeros_like(host["response_mask"]))
    versions = table.per_token(COLUMNS["token_versions"])
    by_row = np.split(versions, np.cumsum(table.lengths)[:-1])
    right_rows = []
    for row, sample_id in enumerate(table.sample_ids.tolist()):
        if host["sample_ids"][row] != sample_id:
            raise LedgerError(
                f"row {row} holds sample {host['sample_ids'][row]} where sample {sample_id} belongs"
            )
        right = rebuild(sample_id, evidence)
        is_cut = _is_cut(table, row, right)
        tensors = {name: values[row] for name, values in host.items()}
        is_trained = _check_tokens(tensors, right, evidence, is_cut=is_cut)
        _compare("weights versions", by_row[row], right.versions, right)
        if all(sampling for sampling, _ in right.ends):
            compared = np.zeros_like(tensors["compared_mask"])
            compared[: len(is_trained)] = is_trained & _is_comparable(
                batch, right, evidence.version
            )
            _compare("compared mask", tensors["compared_mask"], compared, right)
        _check_packed(table, row, evidence.accounts[sample_id].packed)
        written = _written_facts(right, evidence, is_cut=is_cut)
        trained = {
            name: (tensors[name] if name in tensors else table[name][row]) for name in written
        }
        _require_equal(f"sample {sample_id}", trained, written)
        right_rows.append(right)
    return right_rows


def _check_packed(table: SampleTable, row: int, hashes: Mapping[str, str]) -> None:
    """Check what engines record in packed form of a row's tokens."""
    for column in packed_columns():
        if column.name not in table.facts:
            continue
        counts = table.counts(column)
        start = int(counts[:row].sum())
        values = table[column.name][start : start + int(counts[row])]
        if hash_values(values) != hashes.get(column.name):
            raise LedgerError(
                f"sample {table.sample_ids[row]}: {column.name} differ from what the engine "
                "recorded as it sampled"
            )


def _check_tokens(
    tensors: Mapping[str, NDArray[Any]], right: RebuiltRow, evidence: Evidence, *, is_cut: bool
) -> NDArray[np.bool_]:
    """Check the tokens of a row; return [length] bool: those that may be trained."""
    length, is_sampled = len(right.token_ids), right.turns >= 0
    account, real = evidence.accounts[right.sample_id], tensors["attention_mask"]
    num_real = int(real.sum())
    shared = min(length, num_real)
    _compare("token ids", tensors["token_ids"][:shared], right.token_ids[:shared], right)
    if num_real != length or not real[:length].all():
        raise LedgerError(f"sample {right.sample_id} has {num_real} tokens, expected {length}")
    if any(scored_hash != hash_context(right.token_ids) for scored_hash in account.scored):
        raise LedgerError(
            f"sample {right.sample_id}: its reward was given to other tokens than these"
        )
    is_left_out = account.facts["is_masked"] or (evidence.masks_truncated and is_cut)
    is_trained = is_sampled & (not is_left_out)
    mask = np.zeros_like(real)
    mask[:length] = is_trained
    _compare("sampled mask", tensors["response_mask"], mask, right)
    for column in vouched_columns():
        values = tensors[column.name]
        expected = np.full(len(values), column.fill, values.dtype)
        expected[:length][is_trained] = right.vouched[column.name][is_trained]
        kind = f"u{values.itemsize}"
        _compare(f"{column.name} (bits)", values.view(kind), expected.view(kind), right)
    return is_trained


def _written_facts(right: RebuiltRow, evidence: Evidence, *, is_cut: bool) -> dict[str, object]:
    """Return the facts of a row that were written down as they arose."""
    account = evidence.accounts[right.sample_id]
    num_prompt, num_sampled = len(account.prompt), int((right.turns >= 0).sum())
    written: dict[str, object] = {
        "prompt_lengths": num_prompt,
        "response_lengths": len(right.token_ids) - num_prompt,
        "sampled_lengths": num_sampled,
        "is_truncated": is_cut,
        "rewards": np.float32(account.facts["rewards"]),
        "group_ids": account.facts["group_ids"],
    }
    if num_sampled:  # without sampled tokens the version is unknown
        written["weights_versions"] = int(right.versions.max())
    return written


def _is_cut(table: SampleTable, row: int, right: RebuiltRow) -> bool:
    """Return whether the token budget ended a response; by the table if its end is not noted."""
    end = right.ends[-1][1] if right.ends else "abort"
    return end == "length" if end else bool(table.is_truncated[row])


def _is_comparable(batch: RolloutBatch, right: RebuiltRow, version: int) -> NDArray[np.bool_]:
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
                f"sample {right.sample_id}, turn {turn}: temperature differs: it was sampled at "
                f"{drawn.temperature}, the trainer scores at {batch.temperature}"
            )
        cut = drawn.distribution[1:] if drawn.truncates else None
        if cut != replayed and None not in (cut, replayed):
            raise LedgerError(
                f"sample {right.sample_id}, turn {turn}: top_p, top_k and min_p differ: it was "
                f"sampled with {cut}, the trainer replays {replayed}"
            )
        is_like.append(is_same and cut == replayed)
    is_so: NDArray[np.bool_] = np.array([*is_like, False], dtype=np.bool_)
    has_version: NDArray[np.bool_] = np.equal(right.versions, version)
    return is_so[right.turns] & has_version


def _compare(
    what: str, actual: NDArray[np.generic], expected: NDArray[np.generic], right: RebuiltRow
) -> None:
    wrong = np.flatnonzero(actual != expected)
    if not len(wrong):
        return
    place = int(wrong[0])
    # Tokens of prompts and observations count to the last turn before them.
    turn = int(right.turns[: place + 1].max(initial=-1))
    where = f"turn {turn}" if turn >= 0 else "prompt"
    raise LedgerError(
        f"sample {right.sample_id}, {where}, token {place} of {len(right.token_ids)}: {what} "
        f"differ: got {actual[place]}, expected {expected[place]}"
    )


def _check_layout(batch: RolloutBatch, policy: LayoutPolicy, rows: Sequence[RebuiltRow]) -> None:
    """Check the inputs of a forward pass: ids, positions, and the scored places."""
    mask, routes = batch.response_mask, batch.facts.get(ROUTES)
    inputs = batch.token_ids, batch.attention_mask, mask
    layout = policy.lay_out(*inputs, routes=routes, media=batch.media)
    lengths, bounds = [len(row.token_ids) for row in rows], layout.bounds
    all_ids, all_positions = (
        each.flatten().cpu().numpy() for each in (layout.input_ids, layout.position_ids)
    )
    paths, first = _paths(layout, lengths), 0
    if bounds is not None and bounds.group is not None:
        first = dist.get_rank(bounds.group) * len(all_ids)
    for row, path in zip(rows, paths, strict=True):
        places = np.flatnonzero((path >= first) & (path < first + len(all_ids)))
        ids, positions = (each[path[places] - first] for each in (all_ids, all_positions))
        part_of = replace(row, turns=row.turns[places])
        _compare("laid-out ids", ids, row.token_ids[places], part_of)
        _compare("positions", positions, places, part_of)
    _check_scored(layout, mask.cpu().numpy(), rows, paths, first)


def _paths(layout: TokenLayout, lengths: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the places of each row's tokens in the whole input of a forward pass."""
    bounds = layout.bounds
    if bounds is None:
        return [row * layout.shape[1] + np.arange(length) for row, length in enumerate(lengths)]
    borders = [0, *accumulate(lengths)]
    if list(bounds.key_offsets[: len(borders)]) != borders:
        raise LedgerError("a packed stream does not end its sequences where rows end")
    if bounds.shared is None:
        return [np.arange(*border) for border in pairwise(borders)]
    runs = bounds.shared.paths[: len(lengths)]
    paths = [np.concatenate([np.arange(*run) for run in path]) for path in runs]
    # Attention takes the tokens from one border to the next for the end of a row's path.
    is_end = [path[-1] for path in runs] == list(pairwise(bounds.offsets))[: len(lengths)]
    if not is_end or [len(path) for path in paths] != list(lengths):
        raise LedgerError("rows with shared prefixes do not end where their paths end")
    return paths


def _check_scored(
    layout: TokenLayout,
    mask: NDArray[np.bool_],
    rows: Sequence[RebuiltRow],
    paths: Sequence[NDArray[np.int64]],
    first: int,
) -> None:
    """Check that each scored token is predicted once, from the token before it in its row."""
    token_ids, places = np.zeros((2, *mask.shape), dtype=np.int64)
    for number, (row, path) in enumerate(zip(rows, paths, strict=True)):
        token_ids[number, : len(row.token_ids)] = row.token_ids
        places[number, : len(path)] = path
    where, columns = np.nonzero(mask)
    sources = places[where, columns - 1]
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
