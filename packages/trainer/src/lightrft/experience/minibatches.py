"""Optimizer batches of a step: their samples, and the ranks that train them.

The optimizer batches are cut from one seeded permutation of all sample ids of the step, so their
contents do not depend on the number of ranks. Within an optimizer batch every rank gets the same
number of rows, balanced by length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightrft.config import TrainConfig


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """Rows of a `SampleTable` for every optimizer batch and rank.

    Args:
        rows: rows[minibatch][rank] are row indices. Every rank has equally many; only if episodes
            have branches, one may have one row more than another.
        shared: [rows] tokens with which a row and the one before it of its rank begin alike; ()
            where they are not looked at.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    shared: tuple[int, ...] = ()

    @property
    def num_minibatches(self) -> int:
        """Optimizer batches of one epoch."""
        return len(self.rows)

    def row_index(self, rank: int) -> NDArray[np.int64]:
        """Return all rows of one rank, optimizer batch after optimizer batch."""
        return np.array([row for batch in self.rows for row in batch[rank]], dtype=np.int64)

    def places(self, index: int, rank: int) -> slice:
        """Return the slice of an optimizer batch among all rows of a rank."""
        start = sum(len(batch[rank]) for batch in self.rows[:index])
        return slice(start, start + len(self.rows[index][rank]))

    def micro_slices(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        index: int,
        rank: int,
        micro_batch_size: int,
        config: TrainConfig,
    ) -> Sequence[slice]:
        """Return the micro batches of one optimizer batch: consecutive rows of one rank's share.

        Args:
            lengths: [rows] tokens of each sample.
            index: Index of the optimizer batch.
            rank: Rank whose share is cut.
            micro_batch_size: Rows of a micro batch, unless the options count tokens.
            config: Bound of the tokens of a micro batch, padding included unless samples are
                packed; a longer row stands alone.

        Returns:
            Slices that cover the share; every rank gets equally many.
        """
        max_tokens = config.max_micro_tokens(micro_batch_size)
        if max_tokens is None:
            cuts = [micro_slices(0, len(rows), micro_batch_size) for rows in self.rows[index]]
        else:
            free = [config.uncounted_tokens(count) for count in self.shared or [0] * len(lengths)]
            cuts = [
                _cut(
                    [int(lengths[row]) for row in rows],
                    max_tokens,
                    bool(config.packing_samples),
                    [free[row] for row in rows],
                )
                for rows in self.rows[index]
            ]
        return _evened(cuts)[rank]

    def forward_slices(
        self, lengths: NDArray[np.int64], *, rank: int, config: TrainConfig
    ) -> Sequence[slice]:
        """Return the rows of each forward pass over a rank's rows; ranks have equally many."""
        size = config.micro_rollout_batch_size
        if config.max_micro_tokens(size) is None:
            num_ranks = len(self.rows[0])
            counts = [len(self.row_index(each)) for each in range(num_ranks)]
            return _evened([micro_slices(0, count, size) for count in counts])[rank]
        starts = [self.places(index, rank).start for index in range(self.num_minibatches)]
        return [
            slice(starts[index] + part.start, starts[index] + part.stop)
            for index in range(self.num_minibatches)
            for part in self.micro_slices(
                lengths, index=index, rank=rank, micro_batch_size=size, config=config
            )
        ]


def plan_minibatches(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    train_batch_size: int,
    world_size: int,
    seed: int,
    step: int,
    episodes: NDArray[np.int64] | None = None,
    groups: NDArray[np.int64] | None = None,
) -> MinibatchPlan:
    """Cut the samples of one step into optimizer batches and distribute their rows over ranks.

    Args:
        lengths: [rows] tokens of each sample, in the order of the sample ids.
        train_batch_size: Samples of one optimizer batch, over all ranks.
        world_size: Ranks that share an optimizer batch.
        seed, step: Numbers that fix the permutation.
        episodes: [rows] sample of each row, counted from 0; all rows of a sample come into one
            batch. None if every row is a sample.
        groups: [rows] group of each row, if the rows of a group in a batch shall follow each other
            on one rank where its number of rows allows that; None looks at lengths alone.

    Raises:
        ValueError: The sizes do not divide.
    """
    if episodes is None:
        episodes = np.arange(len(lengths))
    num_rows = int(episodes.max(initial=-1)) + 1
    if num_rows == 0 or num_rows % train_batch_size or train_batch_size % world_size:
        raise ValueError(
            "the samples of a step must be a positive multiple of train_batch_size, and that a "
            f"multiple of the number of ranks: got {num_rows} samples, train_batch_size="
            f"{train_batch_size}, {world_size} ranks"
        )
    order = np.random.default_rng([seed, step]).permutation(num_rows)
    minibatches = order.reshape(-1, train_batch_size)
    rows = [np.flatnonzero(np.isin(episodes, batch)) for batch in minibatches]
    if len(lengths) == num_rows:
        rows = list(minibatches)
    if groups is None:
        return MinibatchPlan(tuple(_distribute(batch, lengths, world_size) for batch in rows))
    return MinibatchPlan(
        tuple(_distribute_groups(batch, lengths, world_size, groups) for batch in rows)
    )


def epoch_order(num_minibatches: int, *, seed: int, step: int, epoch: int) -> tuple[int, ...]:
    """Return the order of the optimizer batches in one epoch; the first keeps the plan's."""
    if epoch == 0:
        return tuple(range(num_minibatches))
    order = np.random.default_rng([seed, step, epoch]).permutation(num_minibatches)
    return tuple(int(index) for index in order)


def micro_slices(start: int, stop: int, micro_batch_size: int) -> Sequence[slice]:
    """Return consecutive slices of at most `micro_batch_size` rows that cover [start, stop)."""
    return [
        slice(first, min(first + micro_batch_size, stop))
        for first in range(start, stop, micro_batch_size)
    ]


def _cut(
    lengths: Sequence[int], max_tokens: int, packs_samples: bool, free: Sequence[int]
) -> list[slice]:
    """Return consecutive rows of at most `max_tokens` tokens, padding included unless packed.

    Tokens of `free` do not count for a row that is packed beside the one before it.
    """
    slices: list[slice] = []
    start, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        longest, total = max(longest, length), total + length - (free[row] if row > start else 0)
        num_tokens = total if packs_samples else longest * (row + 1 - start)
        if row > start and num_tokens > max_tokens:
            slices.append(slice(start, row))
            start, longest, total = row, length, length
    return [*slices, slice(start, len(lengths))]


def _evened(cuts: Sequence[Sequence[slice]]) -> list[list[slice]]:
    """Cut to equally many slices on every rank, halving the largest ones.

    The rank with the fewest rows limits their number.
    """
    if len({len(cut) for cut in cuts}) == 1:
        return [list(cut) for cut in cuts]
    num_rows = min(cut[-1].stop for cut in cuts)
    count = min(num_rows, max(len(cut) for cut in cuts))
    return [_split(_joined(cut, count), count) for cut in cuts]


def _joined(slices: Sequence[slice], count: int) -> list[slice]:
    """Join the smallest neighbours until at most `count` slices are left."""
    slices = list(slices)
    while len(slices) > count:
        where = min(range(len(slices) - 1), key=lambda i: slices[i + 1].stop - slices[i].start)
        slices[where : where + 2] = [slice(slices[where].start, slices[where + 1].stop)]
    return slices


def _split(slices: list[slice], count: int) -> list[slice]:
    """Halve the largest slices until there are `count`."""
    slices = list(slices)
    while len(slices) < count:
        where = max(range(len(slices)), key=lambda i: slices[i].stop - slices[i].start)
        whole = slices[where]
        middle = (whole.start + whole.stop + 1) // 2
        slices[where : where + 1] = [slice(whole.start, middle), slice(middle, whole.stop)]
    return slices


def _distribute(
    batch: NDArray[np.int64], lengths: Sequence[int] | NDArray[np.int64], world_size: int
) -> tuple[tuple[int, ...], ...]:
    longest_first = sorted((int(row) for row in batch), key=lambda row: (-int(lengths[row]), row))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for turn, row in enumerate(longest_first):
        lap, seat = divmod(turn, world_size)
        # Every other lap runs backwards, so that no rank always gets the longest of a lap.
        shares[seat if lap % 2 == 0 else world_size - 1 - seat].append(row)
    return tuple(tuple(share) for share in shares)


def _distribute_groups(
    batch: NDArray[np.int64],
    lengths: Sequence[int] | NDArray[np.int64],
    world_size: int,
    groups: NDArray[np.int64],
) -> tuple[tuple[int, ...], ...]:
    """Give each group, the longest first, to the rank with the fewest tokens that has room for it.

    If none has room for a whole group, its rows go to several ranks.
    """
    members: dict[int, list[int]] = {}
    for row in sorted(batch.tolist()):
        members.setdefault(int(groups[row]), []).append(row)
    shares: list[list[int]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    whole, rest = divmod(len(batch), world_size)
    room = [whole + (rank < rest) for rank in range(world_size)]

    def size(rows: Sequence[int]) -> int:
        return sum(int(lengths[row]) for row in rows)

    for rows in sorted(members.values(), key=size, reverse=True):
        while rows:
            fits = [min(free, len(rows)) for free in room]
            rank = min(range(world_size), key=lambda rank: (-fits[rank], sizes[rank]))
            taken, rows = rows[: fits[rank]], rows[fits[rank] :]
            shares[rank] += taken
            room[rank] -= len(taken)
            sizes[rank] += size(taken)
    return tuple(map(tuple, shares))
