"""Dynamic sampling: further groups replace zero-variance ones.

A group is constant if all its responses have equal accuracy. Accuracy is measured before length
shaping, which would make every group look mixed.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, sec. 3.2.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightrft.algorithms.moments import spread
from lightrft.records.table import RowTable, merge
from lightrft.rollout.scoring import require_rewards
from lightrft.rollout.source import (
    RolloutSource,
    SampleRequests,
    Samples,
    Selection,
    SourceParts,
    StreamReport,
    group_results,
    own_positions,
)


class DynamicSource:
    """Source that samples batches from another source until a step has enough mixed groups.

    Args:
        source: Source of each batch.
        parts: Parts of the run.
    """

    def __init__(self, source: RolloutSource, parts: SourceParts) -> None:
        self._source, self._parts = source, parts

    def sample(self, requests: SampleRequests) -> Samples:
        """Sample batches and select the groups to train on."""
        num_wanted, draw = requests.num_prompts, requests.next_prompts
        max_rounds = 1 if draw is None else self._parts.config.max_num_gen_batches
        rounds = [self._source.sample(requests)]
        num_mixed = len(mixed_groups(rounds[0].table))
        # Every rank sees the same tables, so all take the same number of rounds.
        while draw is not None and len(rounds) < max_rounds and num_mixed < num_wanted:
            prompts, first = draw(), sum(each.num_prompts for each in rounds)
            num_new = len(prompts) * self._parts.context.world_size
            positions = own_positions(self._parts.context, num_new, first=first)
            further = replace(
                requests,
                prompts=prompts,
                positions=positions,
                num_prompts=num_new,
                batch=len(rounds),
                stream=rounds[-1].stream,
            )
            rounds.append(self._source.sample(further))
            num_mixed += len(mixed_groups(rounds[-1].table))
        samples = _joined(rounds)
        require_rewards(samples.table, samples.greedy)
        selection = select_groups(samples.table, num_wanted)
        table = apply_selection(samples.table, selection)
        fillers = set(table.group_ids[selection.is_filler].tolist())
        kept = set(table.group_ids.tolist())
        for entry in requests.ledger.entries.values():
            entry.is_filler = entry.group_id in fillers
            entry.is_dismissed = entry.group_id not in kept
        scored = [item for item in samples.scored if item.rollout.group_id in kept]
        groups = group_results(samples.table)
        return replace(samples, table=table, scored=scored, selection=selection, groups=groups)


def _joined(rounds: Sequence[Samples]) -> Samples:
    """Merge the samples of several batches of a step."""
    greedy = [each.greedy for each in rounds if each.greedy is not None]
    evidence = [each.evidence for each in rounds if each.evidence is not None]
    return replace(
        rounds[0],
        scored=[item for each in rounds for item in each.scored],
        table=merge([each.table for each in rounds]),
        num_prompts=sum(each.num_prompts for each in rounds),
        num_rounds=len(rounds),
        report=rounds[0].report and _total([each.report for each in rounds if each.report]),
        stream=rounds[-1].stream,
        greedy=merge(greedy) if greedy else None,
        evidence=replace(
            evidence[0],
            accounts={key: value for each in evidence for key, value in each.accounts.items()},
            entries={key: value for each in evidence for key, value in each.entries.items()},
        )
        if evidence
        else None,
    )


def _total(reports: Sequence[StreamReport]) -> StreamReport:
    """Sum the reports of several rounds of a step."""
    return replace(
        reports[-1],
        num_sampled_tokens=sum(each.num_sampled_tokens for each in reports),
        num_waited=sum(each.num_waited for each in reports),
    )


def mixed_groups(table: RowTable) -> list[int]:
    """Return the ids of groups with different accuracies, ascending; ignore masked rows."""
    mixed = []
    for group in np.unique(table.group_ids):
        kept = table.accuracies[(table.group_ids == group) & ~table.is_masked]
        if len(kept) > 1 and spread(kept.min(), kept.max()) > 0:
            mixed.append(int(group))
    return mixed


def select_groups(table: RowTable, num_wanted: int) -> Selection:
    """Select the first `num_wanted` mixed groups; fillers replace missing ones.

    Args:
        table: All samples of the step over all ranks, equal on all ranks.
        num_wanted: Number of groups of a full step.
    """
    groups = [int(group) for group in np.unique(table.group_ids)]
    mixed = mixed_groups(table)
    constant = sorted(set(groups) - set(mixed))
    kept, fillers = mixed[:num_wanted], constant[: max(0, num_wanted - len(mixed))]
    rows = np.flatnonzero(np.isin(table.group_ids, [*kept, *fillers])).astype(np.int64)
    scored = table.accuracies[~table.is_masked]
    top = scored.max(initial=-np.inf)
    lowest = {g: table.accuracies[table.group_ids == g].min() for g in constant}
    solved = [g for g in constant if len(scored) and spread(lowest[g], top) <= 0]
    return Selection(
        rows=rows,
        is_filler=np.isin(table.group_ids[rows], fillers),
        num_groups=len(groups),
        num_constant=len(constant),
        num_surplus=len(mixed) - len(kept),
        num_solved=len(solved),
        num_scored=len(scored),
        num_sampled_tokens=int(table.sampled_lengths.sum()),
    )


def apply_selection(table: RowTable, selection: Selection) -> RowTable:
    """Return the rows to train on, with fillers masked."""
    taken = table.take(selection.rows)
    return replace(taken, is_masked=taken.is_masked | selection.is_filler)
