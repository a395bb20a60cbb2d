"""Forward passes over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import RowGroup
from lightrft.datasets.row_media import TEXT_ALONE, RowPixels
from lightrft.models.types import ActorOutput, TokenLossFunction
from lightrft.stages.rows.padded_rows import PaddedRows, pad, score_padded

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext


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

    def score(self, rows: PaddedRows, token_loss: TokenLossFunction | None = None) -> ActorOutput:
        """Compute the logprobs of trained tokens under the trained model."""
        return score_padded(self.model, rows, token_loss)
