"""Optimizer steps on given rows."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightrft.config import TrainConfig
from lightrft.datasets.row_media import TEXT_ALONE, RowPixels
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.experience.minibatches import MinibatchPlan
from lightrft.models.types import ActorOutput, TokenLossFunction
from lightrft.stages.rows.padded_rows import PaddedRows, pad
from lightrft.stages.stage import (
    Step,
)

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one optimizer step.

    Args:
        rows: Of all ranks, the same on each.
        plan: Distributes them over the ranks.
    """

    rows: tuple[SupervisedRow, ...]
    plan: MinibatchPlan

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] tokens of each row."""
        return np.array([len(row.token_ids) for row in self.rows], dtype=np.int64)

    @property
    def trained(self) -> NDArray[np.int64]:
        """[rows] trained tokens of each row."""
        return np.array([row.num_trained for row in self.rows], dtype=np.int64)


def best_fit(places: Sequence[int], lengths: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The rows in an order in which they fill packed micro-batches of a bounded size.

    Best-fit decreasing: each row, the longest first, goes to the fullest micro-batch that it fits
    into. A micro-batch is cut where the next row does not fit, and the first row of each one did
    not fit into those before it: so the cuts are those of the packing.

    Args:
        places: Of the rows of a rank.
        lengths: Tokens of every row.
        max_tokens: Of a micro-batch; a longer row stands alone.
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


def drawn_places(step: Step, strategy: StrategyBase) -> list[int]:
    """Places of the rows that all ranks draw for a step, in order; collective.

    Raises:
        RuntimeError: The step has no data.
    """
    if step.data is None:
        raise RuntimeError("steps on given rows draw them from a loader")
    own = cast("Sequence[int]", step.data.next_batch())
    shares: list[list[int]] = strategy.gather_objects(list(own))
    return sorted(place for share in shares for place in share)


def bounded_by_tokens(config: TrainConfig, *, rows_per_item: int = 1) -> TrainConfig:
    """The configuration by which micro-batches are cut.

    A packed one holds what as many of the longest rows would.
    """
    bound = config.micro_batch_tokens
    if bound is None and config.packing_samples:
        bound = config.micro_train_batch_size * config.max_row_tokens * rows_per_item
    return config.replaced({"micro_batch_tokens": bound})


def score_rows(
    model: nn.Module,
    rows: Sequence[SupervisedRow],
    device: torch.device,
    *,
    pixels: RowPixels = TEXT_ALONE,
) -> ActorOutput:
    """See `pad` and `score_padded`."""
    return score_padded(model, pad(rows, device, pixels=pixels))


def score_padded(
    model: nn.Module, padded: PaddedRows, token_loss: TokenLossFunction | None = None
) -> ActorOutput:
    """Logprobs of the trained tokens of some rows; 0 elsewhere."""
    output: ActorOutput = model(
        padded.token_ids,
        padded.attention_mask,
        scored_mask=padded.is_trained,
        token_loss=token_loss,
        media=padded.media,
    )
    return output


def _num_trained(rows: Sequence[SupervisedRow]) -> float:
    return float(sum(row.num_trained for row in rows))


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, which stays finite."""
    return math.exp(min(loss, 700.0))


def planned_updates(data: Sized, config: TrainConfig, strategy: StrategyBase) -> int:
    """Optimizer steps of a whole run; see `num_updates`."""
    return num_updates(len(data), config, strategy.world_size)


def num_updates(num_rows: int, config: TrainConfig, world_size: int = 1) -> int:
    """Optimizer steps of a run on so many rows: whole batches of each of `max_epochs` passes."""
    shared = num_rows // world_size * world_size
    total = shared // config.train_batch_size * config.max_epochs
    return total if config.max_steps is None else min(total, config.max_steps)
