"""Forward passes over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import torch
from torch import nn

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import Item, RowGroup
from lightrft.datasets.row_media import TEXT_ALONE, RowPixels
from lightrft.models.types import ActorOutput, TokenLossFunction
from lightrft.stages.rows.padded_rows import PaddedRows, pad, score_padded
from lightrft.stages.rows.row_part import RowPart, shared_part

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Item]):
    """Items of one forward pass.

    Args:
        items: Items, at least one.
        rows: Rows of the items, one item after the other.
        where: Slice of the items among those of the rank.
    """

    items: Sequence[Item]
    rows: PaddedRows
    where: slice


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

    def pad(self, items: Sequence[RowGroup], places: Sequence[int] = ()) -> PaddedRows:
        """Build tensors of the rows of some items.

        Args:
            items: Items, at least one.
            places: Places of the rows among those of the step.
        """
        rows = [row for item in items for row in item.rows]
        return pad(rows, self.device, places, pixels=self.pixels)

    def micro_batch(self, part: RowPart[Item], where: slice) -> MicroBatch[Item]:
        """Build the micro-batch of some of a rank's items."""
        items = part.local_items[where]
        return MicroBatch(items, self.pad(items, part.row_places(where)), where)

    def shared_part(self, items: Sequence[Item]) -> RowPart[Item]:
        """Distribute items that are only scored over the ranks; see `row_part.shared_part`."""
        return shared_part(items, self.config, self.context)

    def score(self, rows: PaddedRows, token_loss: TokenLossFunction | None = None) -> ActorOutput:
        """Compute the logprobs of trained tokens under the trained model."""
        return score_padded(self.model, rows, token_loss)
