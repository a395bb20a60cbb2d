"""Rows of a micro-batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.row_media import TEXT_ALONE, RowPixels
from lightrft.engines.media.media import NO_MEDIA, RowMedia
from lightrft.models.layout import pad_rows
from lightrft.models.types import ActorOutput, TokenLossFunction


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
