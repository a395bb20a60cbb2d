"""Batches of prompts or other items over several passes, from any position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lightrft.config import TrainConfig
from lightrft.datasets.prompt_sampler import GroupResult, SampledRows, SampledStream
from lightrft.datasets.types import Prompt

if TYPE_CHECKING:
    from lightrft.strategy.sampler import DistributedSampler

Item = TypeVar("Item")
Batches = DataLoader[Item] | Iterable[Sequence[Item]] | SampledRows[Item]


def known_items(batches: Batches[Item] | None) -> Iterable[Item]:
    """Return all items of a data loader; none of other iterables, which reading uses up."""
    if isinstance(batches, SampledRows):
        return batches.items
    if not isinstance(batches, DataLoader) or isinstance(batches.dataset, IterableDataset):
        return ()
    return cast("Iterable[Item]", batches.dataset)


class BatchStream(Generic[Item]):
    """Batches of this rank from a loader, pass after pass, in the order of the loader.

    Args:
        batches: Data loader (or any re-iterable) of lists of items, one list a step.
        episode: Pass to start with.
        num_consumed: Items of that pass already used, over all ranks.
        world_size: Ranks that share a pass.
    """

    def __init__(
        self,
        batches: DataLoader[Item] | Iterable[Sequence[Item]],
        *,
        world_size: int,
        episode: int = 0,
        num_consumed: int = 0,
    ) -> None:
        self._batches = batches
        self._world_size = world_size
        self.sampler_state = ""
        self._iterator = self._start(episode, num_consumed)
        self.episode = episode
        self.num_consumed = num_consumed

    def next_batch(self) -> Sequence[Item]:
        """Return the items of the next step; start the next pass when one is over.

        Raises:
            ValueError: A whole pass has no full batch.
        """
        batch = next(self._iterator, None)
        if batch is None:
            self.episode, self.num_consumed = self.episode + 1, 0
            self._iterator = self._start(self.episode, 0)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(
                "the prompts do not fill one batch: give at least rollout_batch_size prompts, or "
                "lower rollout_batch_size"
            )
        self.num_consumed += len(batch) * self._world_size
        return batch

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Do nothing: results do not change the order of a loader."""

    def _start(self, episode: int, num_consumed: int) -> Iterator[Sequence[Item]]:
        sampler = _own_sampler(self._batches)
        if sampler is not None:
            sampler.set_epoch(episode, num_consumed)
            return iter(self._batches)
        if isinstance(self._batches, DataLoader) and isinstance(
            self._batches.sampler, TorchDistributedSampler
        ):
            self._batches.sampler.set_epoch(episode)
        batches: Iterator[Sequence[Item]] = iter(self._batches)
        num_items = num_consumed // self._world_size
        while num_items > 0:
            num_items -= len(next(batches, ()) or range(num_items))
        return batches


def _own_sampler(batches: Batches[Item]) -> DistributedSampler | None:
    """Return the sampler of a loader that `setup_dataloader` made; None of other batches."""
    if not isinstance(batches, DataLoader):
        return None
    from lightrft.strategy.sampler import DistributedSampler

    return batches.sampler if isinstance(batches.sampler, DistributedSampler) else None


Draws = BatchStream[Item] | SampledStream[Item]


def open_stream(
    batches: Batches[Item],
    *,
    world_size: int,
    episode: int = 0,
    num_consumed: int = 0,
    sampler_state: str = "",
) -> Draws[Item]:
    """Return the batches of this rank from a position on; see `BatchStream`."""
    if isinstance(batches, SampledRows):
        return batches.stream(episode, num_consumed, sampler_state)
    return BatchStream(batches, world_size=world_size, episode=episode, num_consumed=num_consumed)


def check_lengths(prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Raise a ValueError that names the prompts with more than `max_tokens` tokens."""
    too_long = [prompt.id for prompt in prompts if len(prompt.token_ids) > max_tokens]
    if too_long:
        raise ValueError(
            f"{len(too_long)} prompts (rows {too_long[:10]}) exceed prompt_max_len = {max_tokens} "
            "tokens: leave them out, or raise prompt_max_len"
        )


def batches_per_episode(batches: Batches[Item], *, world_size: int, batch_size: int) -> int:
    """Return the number of steps of one whole pass.

    Args:
        batches: Data loader, or a sized iterable of batches.
        world_size: Ranks that share a pass.
        batch_size: Prompts of one step, over all ranks.

    Raises:
        ValueError: There is less than one batch, or the length is unknown.
    """
    sampler = _own_sampler(batches)
    if sampler is not None:
        # The loader's length shrinks while a pass is resumed in its middle.
        count = sampler.num_samples * world_size // batch_size
    else:
        try:
            count = len(batches)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError("the prompts need a length; give max_steps, or a list") from error
    if count < 1:
        raise ValueError(
            f"the prompts do not fill one batch of rollout_batch_size={batch_size}: give more "
            "prompts, or lower rollout_batch_size"
        )
    return count


def planned_steps(
    batches: Batches[Item] | None,
    config: TrainConfig,
    world_size: int,
    *,
    num_updates_per_episode: int | None = None,
) -> int:
    """Return the number of steps of a whole run, including those before a resume.

    Args:
        batches: Data loader, or a sized iterable of batches.
        config: Options `num_episodes`, `max_steps` and the batch sizes.
        world_size: Ranks that share a pass.
        num_updates_per_episode: Optimizer steps of one pass; None uses all prompts.

    Raises:
        ValueError: There are no prompts, or they do not fill one batch.
    """
    if batches is None:
        raise ValueError("fit needs prompts: give prompts_dataloader= here or at construction")
    per_episode = batches_per_episode(
        batches, world_size=world_size, batch_size=config.rollout_batch_size
    )
    if num_updates_per_episode is not None:
        wanted = math.ceil(num_updates_per_episode / config.steps_per_rollout)
        per_episode = min(per_episode, wanted)
    total = per_episode * config.num_episodes
    return total if config.max_steps is None else min(total, config.max_steps)
