"""Items of a step or an evaluation: shares of the ranks, micro-batches and forward passes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightrft.config import RowRunOptions, TrainConfig
from lightrft.datasets.row_data import TEXT_ALONE, Item, RowPixels, SupervisedRow
from lightrft.engines.media.media import NO_MEDIA, RowMedia
from lightrft.experience.minibatches import MinibatchPlan, micro_slices, plan_minibatches
from lightrft.models.layout import pad_rows
from lightrft.models.types import ActorOutput, TokenLossFunction

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of a micro-batch in the form of a model's inputs.

    Args:
        ids: Places of the rows among those of the step.
        token_ids: [batch, seq] int64.
        attention_mask, is_trained: [batch, seq] bool.
        media: Images and videos of the rows.
    """

    ids: tuple[int, ...]
    token_ids: Tensor
    attention_mask: Tensor
    is_trained: Tensor
    media: RowMedia = NO_MEDIA


def pad(
    rows: Sequence[SupervisedRow],
    device: torch.device,
    ids: Sequence[int] = (),
    *,
    pixels: RowPixels = TEXT_ALONE,
) -> PaddedRows:
    """Return the rows as tensors on a device.

    Args:
        rows: Rows, at least one.
        device: Device of the tokens.
        ids: Places of the rows among those of the step.
        pixels: Reads the media of the rows.
    """
    token_ids, attention_mask = pad_rows([row.token_ids.tolist() for row in rows], device)
    is_trained, _ = pad_rows([row.is_trained.tolist() for row in rows], device)
    media = pixels.read(rows)
    return PaddedRows(tuple(map(int, ids)), token_ids, attention_mask, is_trained.bool(), media)


def score_padded(
    model: nn.Module, padded: PaddedRows, token_loss: TokenLossFunction | None = None
) -> ActorOutput:
    """Compute logprobs of the trained tokens of some rows; 0 elsewhere."""
    output: ActorOutput = model(
        padded.token_ids,
        padded.attention_mask,
        scored_mask=padded.is_trained,
        token_loss=token_loss,
        media=padded.media,
    )
    return output


@dataclass(frozen=True, slots=True)
class RowPasses:
    """Forward passes of the trained model over rows.

    Args:
        config: Options of the run.
        context: Ranks that train.
        model: Trained model.
        pixels: Reads images and videos of the rows.
    """

    config: TrainConfig
    context: DistributedContext
    model: nn.Module
    pixels: RowPixels = TEXT_ALONE

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.context.device

    def pad(self, rows: Sequence[SupervisedRow], places: Sequence[int] = ()) -> PaddedRows:
        """Build tensors of some rows.

        Args:
            rows: Rows, at least one.
            places: Places of the rows among those of the step.
        """
        return pad(rows, self.device, places, pixels=self.pixels)

    def score(self, rows: PaddedRows, token_loss: TokenLossFunction | None = None) -> ActorOutput:
        """Compute the logprobs of trained tokens under the trained model."""
        return score_padded(self.model, rows, token_loss)


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Item]):
    """Items of one forward pass.

    Args:
        passes: Forward passes of the trained model.
        items: Items, at least one.
        rows: Rows of the items, one item after the other.
        where: Slice of the items among those of the rank.
    """

    passes: RowPasses
    items: Sequence[Item]
    rows: PaddedRows
    where: slice


@dataclass(frozen=True)
class RowPart(Generic[Item]):
    """Items of all ranks, and the places of one rank's items.

    Args:
        passes: Forward passes of the trained model.
        items: Items of all ranks, equal on each.
        places: [local] places of this rank's items. The first `num_counted` count; repeated ones
            follow, so that every rank makes equally many passes. Otherwise sharded layers would
            wait for each other.
        slices: Micro-batches of this rank's items, each of only counted or only repeated ones.
        num_counted: Number of this rank's items that count.
    """

    passes: RowPasses
    items: tuple[Item, ...]
    places: NDArray[np.int64]
    slices: tuple[slice, ...]
    num_counted: int

    @cached_property
    def local_items(self) -> list[Item]:
        """This rank's items, including repeated ones."""
        return [self.items[place] for place in self.places]

    @property
    def is_counted(self) -> NDArray[np.bool_]:
        """[local] False for a repeated item."""
        return np.arange(len(self.places)) < self.num_counted

    @cached_property
    def _row_starts(self) -> list[int]:
        starts: list[int] = np.cumsum([0, *(len(item.rows) for item in self.items)]).tolist()
        return starts

    def micro_batch(self, where: slice) -> MicroBatch[Item]:
        """Build the micro-batch of some of this rank's items."""
        items, starts = self.local_items[where], self._row_starts
        places = [
            row for place in self.places[where] for row in range(starts[place], starts[place + 1])
        ]
        rows = [row for item in items for row in item.rows]
        return MicroBatch(self.passes, items, self.passes.pad(rows, places), where)


def planned_part(
    items: tuple[Item, ...], config: TrainConfig, passes: RowPasses, *, step: int
) -> RowPart[Item]:
    """Distribute the items of an optimizer step over the ranks, equal in number and length.

    Args:
        items: Items of all ranks, equal on each.
        config: Options; the seed, `packing_samples` and sizes of micro-batches are read; see
            `token_bound`.
        passes: Forward passes of the trained model.
        step: Number of the step, which fixes the permutation together with the seed.
    """
    context = passes.context
    # The rows of an item lie in one micro-batch, padded to the longest one unless packed.
    sizes = [[len(row.token_ids) for row in item.rows] for item in items]
    lengths = [sum(each) if config.packing_samples else len(each) * max(each) for each in sizes]
    plan = plan_minibatches(
        lengths,
        train_batch_size=len(items),
        world_size=context.num_data_ranks,
        seed=config.seed,
        step=step,
    )
    if config.packing_samples and config.micro_batch_tokens is not None:
        shares = (best_fit(rows, lengths, config.micro_batch_tokens) for rows in plan.rows[0])
        plan = MinibatchPlan((tuple(shares),))
    slices = plan.micro_slices(
        lengths,
        index=0,
        rank=context.data_rank,
        micro_batch_size=config.micro_train_batch_size,
        config=config,
    )
    places = plan.row_index(context.data_rank)
    return RowPart(passes, items, places, tuple(slices), len(places))


def shared_part(items: Sequence[Item], passes: RowPasses) -> RowPart[Item]:
    """Distribute items that are only scored over the ranks, one after the other."""
    context, size = passes.context, passes.config.micro_train_batch_size
    num_ranks = context.num_data_ranks
    places = np.arange(context.data_rank, len(items), num_ranks)
    slices = list(micro_slices(0, len(places), size))
    num_counted, most = len(places), math.ceil(len(items) / num_ranks)
    num_passes = math.ceil(most / size)
    for number in range(num_counted, num_counted + num_passes - len(slices)):
        slices.append(slice(number, number + 1))
        places = np.append(places, 0)
    return RowPart(passes, tuple(items), places, tuple(slices), num_counted)


def token_bound(config: RowRunOptions, *, rows_per_item: int = 1) -> int | None:
    """Return the most tokens of a micro-batch, or None where rows are counted.

    For packed micro-batches it is the tokens of `micro_train_batch_size` items of longest rows.
    """
    bound = config.micro_batch_tokens
    if bound is None and config.packing_samples:
        bound = config.micro_train_batch_size * config.max_row_tokens * rows_per_item
    return bound


def best_fit(places: Sequence[int], lengths: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Return the rows in an order that fills packed micro-batches of a bounded size.

    Best-fit decreasing: each row, the longest first, goes to the fullest micro-batch that it fits
    into. A micro-batch is cut where the next row does not fit. The first row of each micro-batch
    did not fit into those before it, so the cuts are those of the packing.

    Args:
        places: Places of a rank's rows.
        lengths: Tokens of every row.
        max_tokens: Most tokens of a micro-batch; a longer row stands alone.
    """
    packs: list[list[int]] = []
    # Room and number of each pack, the fullest first.
    rooms: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda place: -lengths[place]):
        where = bisect_left(rooms, (lengths[place], -1))
        room, number = rooms.pop(where) if where < len(rooms) else (max_tokens, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(place)
        insort(rooms, (room - lengths[place], number))
    return tuple(place for pack in packs for place in pack)
