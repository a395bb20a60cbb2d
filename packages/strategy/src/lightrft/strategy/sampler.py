"""Dividing a data set among ranks, reproducibly and resumably."""

from collections.abc import Iterator, Sized
from itertools import islice

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler


class DistributedSampler(TorchSampler[int]):
    """Indices of one rank; over all ranks each index comes exactly once per epoch.

    If the data does not divide evenly, `drop_last` leaves out the last indices of the shuffled
    order; otherwise the first ones are repeated. Resuming skips the first `consumed_samples`
    indices of the epoch, counted over all ranks.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks.
        rank: This rank, in [0, num_replicas).
        shuffle: Draw a new order each epoch from `seed + epoch`.
        seed: Must be the same on all ranks.
        drop_last: Leave out the indices that do not divide evenly.
        consumed_samples: Indices of this epoch already used, over all ranks.

    Raises:
        ValueError: A rank, count or `consumed_samples` is out of range.
    """

    def __init__(
        self,
        dataset: Dataset[object] | Sized,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ValueError(f"the data set needs a length, got {type(dataset).__name__}")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.num_items = len(dataset)
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the order and how much of it was used already.

        Args:
            epoch: Number of the pass over the data.
            consumed_samples: Indices of this epoch already used, over all ranks.

        Raises:
            ValueError: More than an epoch was consumed, or less than nothing.
        """
        if not 0 <= consumed_samples <= max(self.total_size, self.num_items):
            raise ValueError(
                f"consumed_samples must be in [0, {self.total_size}] (one epoch): got "
                f"{consumed_samples}; use set_epoch(consumed // {self.total_size}, "
                f"consumed % {self.total_size})"
            )
        super().set_epoch(epoch)
        self.consumed_per_rank = min(consumed_samples // self.num_replicas, self.num_samples)

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.consumed_per_rank, None)

    def __len__(self) -> int:
        return self.num_samples - self.consumed_per_rank
