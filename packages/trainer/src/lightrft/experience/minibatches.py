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
        rows: rows[minibatch][rank] are row indices; every rank has equally many.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_minibatches(self) -> int:
        """Optimizer batches of one epoch."""
        return len(self.rows)

    def row_index(self, rank: int) -> NDArray[np.int64]:
        """All rows of one rank, optimizer batch after optimizer batch."""
        return np.array([row for batch in self.rows for row in batch[rank]], dtype=np.int64)

    def places(self, index: int) -> slice:
        """Where the rows of an optimizer batch stand among all rows of a rank."""
        size = len(self.rows[index][0])
        return slice(index * size, (index + 1) * size)

    def micro_slices(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        index: int,
        rank: int,
        micro_batch_size: int,
        config: TrainConfig,
    ) -> Sequence[slice]:
        """Micro batches of one optimizer batch: consecutive rows of one rank's share.

        Args:
            lengths: [rows] tokens of each sample.
            index: Of the optimizer batch.
            rank: Whose share.
            micro_batch_size: Rows of a micro batch, where the options do not count tokens.
            config: Bound of the tokens of a micro batch, padding included unless samples are
                packed; a longer row stands alone.

        Returns:
            Slices that cover the share; every rank gets equally many.
        """
        max_tokens = config.max_micro_tokens(micro_batch_size)
        if max_tokens is None:
            return micro_slices(0, len(self.rows[index][rank]), micro_batch_size)
        cuts = [
            _cut([int(lengths[row]) for row in rows], max_tokens, bool(config.packing_samples))
            for rows in self.rows[index]
        ]
        return _split(cuts[rank], max(len(cut) for cut in cuts))

    def forward_slices(
        self, lengths: NDArray[np.int64], *, rank: int, config: TrainConfig
    ) -> Sequence[slice]:
        """Rows of each forward pass over all rows of one rank; every rank has equally many."""
        size = config.micro_rollout_batch_size
        if config.max_micro_tokens(size) is None:
            return micro_slices(0, len(self.row_index(rank)), size)
        return [
            slice(self.places(index).start + part.start, self.places(index).start + part.stop)
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
) -> MinibatchPlan:
    """Cuts the samples of one step into optimizer batches and distributes their rows over ranks.

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
    return MinibatchPlan(tuple(_distribute(batch, lengths, world_size) for batch in minibatches))


def epoch_order(num_minibatches: int, *, seed: int, step: int, epoch: int) -> tuple[int, ...]:
    """The order in which one epoch visits the optimizer batches; the first keeps the plan's."""
    if epoch == 0:
        return tuple(range(num_minibatches))
    order = np.random.default_rng([seed, step, epoch]).permutation(num_minibatches)
    return tuple(int(index) for index in order)


def micro_slices(start: int, stop: int, micro_batch_size: int) -> Sequence[slice]:
    """Consecutive slices of at most `micro_batch_size` rows that cover [start, stop)."""
    return [
        slice(first, min(first + micro_batch_size, stop))
        for first in range(start, stop, micro_batch_size)
    ]


def _cut(lengths: Sequence[int], max_tokens: int, packs_samples: bool) -> list[slice]:
    """Consecutive rows of at most `max_tokens` tokens, padding included unless packed."""
    slices: list[slice] = []
    start, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        num_tokens = total if packs_samples else longest * (row + 1 - start)
        if row > start and num_tokens > max_tokens:
            slices.append(slice(start, row))
            start, longest, total = row, length, length
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
