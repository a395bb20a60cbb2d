"""Dynamic sampling: zero-variance groups give their place to further ones.

A group is constant if its responses are all equally accurate; accuracy is taken before any length
shaping, with which every group would look mixed.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, sec. 3.2.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightrft.records.table import RowTable


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups a step trains on, and what became of the others.

    Args:
        rows: Rows of the table of all sampled groups to train on, ascending.
        is_filler: [len(rows)] bool, rows of constant groups that only keep the batch full; they
            are excluded from the loss.
        num_groups, num_constant, num_surplus: Groups sampled, constant among them, and mixed ones
            beyond what the step needed.
        num_solved: Constant groups at the highest accuracy that any response of the step reached.
        num_sampled_tokens: Tokens sampled for all groups.
    """

    rows: NDArray[np.int64]
    is_filler: NDArray[np.bool_]
    num_groups: int
    num_constant: int
    num_surplus: int
    num_solved: int
    num_sampled_tokens: int

    @property
    def is_empty(self) -> bool:
        """Whether every group is constant, so that there is nothing to train on."""
        return bool(self.is_filler.all())


def mixed_groups(table: RowTable) -> list[int]:
    """Ids of the groups whose responses differ in accuracy, ascending; masked rows do not count."""
    mixed = []
    for group in np.unique(table.group_ids):
        kept = table.accuracies[(table.group_ids == group) & ~table.is_masked]
        if len(kept) > 1 and np.ptp(kept) > 0:
            mixed.append(int(group))
    return mixed


def select_groups(table: RowTable, num_wanted: int) -> Selection:
    """The first `num_wanted` mixed groups; fillers make up for missing ones.

    Args:
        table: All samples of the step over all ranks, the same on every rank.
        num_wanted: Groups of a full step.
    """
    groups = [int(group) for group in np.unique(table.group_ids)]
    mixed = mixed_groups(table)
    constant = sorted(set(groups) - set(mixed))
    kept, fillers = mixed[:num_wanted], constant[: max(0, num_wanted - len(mixed))]
    rows = np.flatnonzero(np.isin(table.group_ids, [*kept, *fillers])).astype(np.int64)
    scored = table.accuracies[~table.is_masked]
    top = scored.max()
    solved = [g for g in constant if (table.accuracies[table.group_ids == g] == top).all()]
    return Selection(
        rows=rows,
        is_filler=np.isin(table.group_ids[rows], fillers),
        num_groups=len(groups),
        num_constant=len(constant),
        num_surplus=len(mixed) - len(kept),
        num_solved=len(solved),
        num_sampled_tokens=int(table.sampled_lengths.sum()),
    )


def apply_selection(table: RowTable, selection: Selection) -> RowTable:
    """The rows to train on, fillers masked."""
    taken = table.take(selection.rows)
    return replace(taken, is_masked=taken.is_masked | selection.is_filler)
