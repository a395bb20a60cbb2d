"""Which sample is trained in which optimizer batch and on which rank.

The optimizer batches are cut from one seeded permutation of all sample ids of the step, so their
contents do not depend on the number of ranks. Within an optimizer batch every rank gets the same
number of rows, balanced by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """Rows of a `SampleTable` for every optimizer batch and rank.

    Args:
        rows: rows[minibatch][rank] are row indices; every rank has equally many.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_minibatches(self) -> int:
        """Optimizer batches of one epoch."""
        return len(self.rows)

    def rows_of(self, rank: int) -> tuple[int, ...]:
        """All rows of one rank, optimizer batch after optimizer batch."""
        return tuple(row for minibatch in self.rows for row in minibatch[rank])

    def micro_slices(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        index: int,
        rank: int,
        max_tokens: int,
        packs_samples: bool = False,
    ) -> tuple[slice, ...]:
        """Micro batches of one optimizer batch: consecutive rows of one rank's share.

        Args:
            lengths: [rows] tokens of each sample.
            index: Of the optimizer batch.
            rank: Whose share.
            max_tokens: Bound of the tokens of a micro batch; a longer row stands alone.
            packs_samples: Count the rows' tokens; else rows * longest row, padding included.

        Returns:
            Slices that cover the share; every rank gets equally many.
        """
        shares = [[int(lengths[row]) for row in rows] for rows in self.rows[index]]
        cut = _cut_stream if packs_samples else _cut
        count = max(len(cut(share, max_tokens)) for share in shares)
        return tuple(_split(cut(shares[rank], max_tokens), count))

    def row_index(self, rank: int) -> NDArray[np.int64]:
        """`rows_of` as an array."""
        return np.array(self.rows_of(rank), dtype=np.int64)


def plan_minibatches(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    train_batch_size: int,
    world_size: int,
    seed: int,
    step: int,
) -> MinibatchPlan:
    """Cuts the samples of one step into optimizer batches and deals their rows to ranks.

    Args:
        lengths: [rows] tokens of each sample, in the order of the sample ids.
        train_batch_size: Samples of one optimizer batch, over all ranks.
        world_size: Ranks that share an optimizer batch.
        seed, step: Fix the permutation.

    Raises:
        ValueError: The sizes do not divide.
    """
    num_rows = len(lengths)
    if num_rows == 0 or num_rows % train_batch_size or train_batch_size % world_size:
        raise ValueError(
            "the samples of a step must be a positive multiple of train_batch_size, and that a "
            f"multiple of the number of ranks: got {num_rows} samples, train_batch_size="
            f"{train_batch_size}, {world_size} ranks"
        )
    order = np.random.default_rng([seed, step]).permutation(num_rows)
    minibatches = order.reshape(-1, train_batch_size)
    return MinibatchPlan(tuple(_deal(batch, lengths, world_size) for batch in minibatches))


def epoch_order(num_minibatches: int, *, seed: int, step: int, epoch: int) -> tuple[int, ...]:
    """The order in which one epoch visits the optimizer batches; the first keeps the plan's."""
    if epoch == 0:
        return tuple(range(num_minibatches))
    order = np.random.default_rng([seed, step, epoch]).permutation(num_minibatches)
    return tuple(int(index) for index in order)


def _cut(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    slices: list[slice] = []
    start, width = 0, 0
    for row, length in enumerate(lengths):
        wider = max(width, length)
        if row > start and wider * (row + 1 - start) > max_tokens:
            slices.append(slice(start, row))
            start, wider = row, length
        width = wider
    return [*slices, slice(start, len(lengths))]


def _cut_stream(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    slices: list[slice] = []
    start, num_tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > start and num_tokens + length > max_tokens:
            slices.append(slice(start, row))
            start, num_tokens = row, 0
        num_tokens += length
    return [*slices, slice(start, len(lengths))]


def _split(slices: list[slice], count: int) -> list[slice]:
    """As many slices as every other rank has: the largest ones are halved."""
    slices = list(slices)
    while len(slices) < count:
        where = max(range(len(slices)), key=lambda i: slices[i].stop - slices[i].start)
        whole = slices[where]
        middle = (whole.start + whole.stop + 1) // 2
        slices[where : where + 1] = [slice(whole.start, middle), slice(middle, whole.stop)]
    return slices


def _deal(
    batch: NDArray[np.int64], lengths: Sequence[int] | NDArray[np.int64], world_size: int
) -> tuple[tuple[int, ...], ...]:
    longest_first = sorted((int(row) for row in batch), key=lambda row: (-int(lengths[row]), row))
    hands: list[list[int]] = [[] for _ in range(world_size)]
    for turn, row in enumerate(longest_first):
        lap, seat = divmod(turn, world_size)
        # Every other lap runs backwards, so that no rank always gets the longest of a lap.
        hands[seat if lap % 2 == 0 else world_size - 1 - seat].append(row)
    return tuple(tuple(hand) for hand in hands)
