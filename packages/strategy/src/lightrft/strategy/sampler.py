"""Dividing a data set among ranks, reproducibly and resumably."""

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Dataset, Sampler


class DistributedSampler(Sampler[int]):
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
        drop_last: See above.
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
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        if not isinstance(dataset, Sized):
            raise ValueError(f"the data set needs a length, got {type(dataset).__name__}")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        length = len(dataset)
        self.num_samples = length // num_replicas if drop_last else math.ceil(length / num_replicas)
        self.total_size = self.num_samples * num_replicas
        self.consumed_per_rank = 0
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Chooses the order and how much of it was used already.

        Args:
            epoch: Number of the pass over the data.
            consumed_samples: Indices of this epoch already used, over all ranks.

        Raises:
            ValueError: More than an epoch was consumed, or less than nothing.
        """
        if not 0 <= consumed_samples <= max(self.total_size, len(self.dataset)):
            raise ValueError(
                f"consumed_samples must be in [0, {self.total_size}] (one epoch): got "
                f"{consumed_samples}; use set_epoch(consumed // {self.total_size}, "
                f"consumed % {self.total_size})"
            )
        self.epoch = epoch
        self.consumed_per_rank = min(consumed_samples // self.num_replicas, self.num_samples)

    def __iter__(self) -> Iterator[int]:
        length = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator).tolist()
        else:
            order = list(range(length))
        if length:
            repeats = math.ceil(self.total_size / length)
            order = (order * repeats)[: self.total_size]
        own = order[self.rank :: self.num_replicas]
        return iter(own[self.consumed_per_rank :])

    def __len__(self) -> int:
        return self.num_samples - self.consumed_per_rank
