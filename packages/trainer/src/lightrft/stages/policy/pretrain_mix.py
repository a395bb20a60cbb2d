"""Loss of supervised training on other rows, mixed into every optimizer step of the actor.

Source: Ouyang et al. 2022 (InstructGPT, PPO-ptx), arXiv:2203.02155, eq. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.algorithms.aggregation import loss_weights
from lightrft.algorithms.supervised_losses import LOSSES
from lightrft.config import TrainConfig, TrainingOptions
from lightrft.datasets.files import Row, read_rows
from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.supervised_rows import TRAINABLE, RowEncoder, kind_of
from lightrft.datasets.types import DataError
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.row_passes import pad, score_padded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.strategy.distributed.context import DistributedContext

_LOSS = LOSSES["token-mean"]
_TEXT_COLUMN = "text"


@dataclass(frozen=True, slots=True)
class PretrainMix:
    """ptx_coef * mean over the trained tokens of a batch of rows of -log p(token).

    Args:
        texts: Rows of supervised training, equal on all ranks.
        coef: Weight of the loss.
        batch_size: Rows of one optimizer step, over all ranks.
        seed: Fixes the order of the rows in each pass over them.
    """

    texts: Sequence[SupervisedRow]
    coef: float
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.texts or self.batch_size < 1 or self.coef <= 0:
            raise ValueError(
                "a pre-training loss needs texts, batch_size >= 1 and a positive weight: got "
                f"{len(self.texts)}, {self.batch_size} and {self.coef}"
            )

    def rows(self, position: int) -> list[int]:
        """Return the texts of optimizer step `position` of the run, over all ranks."""
        first = position * self.batch_size
        places = [divmod(first + i, len(self.texts)) for i in range(self.batch_size)]
        orders = {
            number: np.random.default_rng([self.seed, number]).permutation(len(self.texts))
            for number in {number for number, _ in places}
        }
        return [int(orders[number][place]) for number, place in places]

    def shares(
        self,
        actor: nn.Module,
        position: int,
        context: DistributedContext,
        config: TrainingOptions,
        metrics: StepMetrics,
    ) -> list[Callable[[], Tensor]]:
        """Return this rank's micro batches; every rank gets equally many, empty ones included.

        Args:
            actor: Model that scores the texts.
            position: Optimizer steps of the actor before this one.
            context: Process groups and device.
            config: Rows of one forward and backward pass.
            metrics: Receives `ptx_loss`.
        """
        rows, num_ranks = self.rows(position), context.num_data_ranks
        # Counted on every rank from the masks of the loss.
        num_tokens = sum(self.texts[row].num_trained for row in rows)
        rank_rows = rows[context.data_rank :: num_ranks]
        num_rows, size = -(-len(rows) // num_ranks), config.micro_train_batch_size
        metrics.add_mean("ptx_loss", 0.0, 1.0 / num_ranks)
        return [
            partial(
                self._share,
                actor,
                rank_rows[start : start + size],
                num_tokens,
                context.device,
                metrics,
            )
            for start in range(0, num_rows, size)
        ]

    def _share(
        self,
        actor: nn.Module,
        rows: Sequence[int],
        num_tokens: int,
        device: torch.device,
        metrics: StepMetrics,
    ) -> Tensor:
        # A rank without rows scores one row and multiplies by 0: backward is a collective.
        padded = pad([self.texts[row] for row in rows] or [self.texts[0]], device)
        weights = loss_weights(padded.is_trained, _LOSS.aggregation, dtype=torch.float64)
        logprobs = score_padded(actor, padded).logprobs
        share = _LOSS.share(logprobs, weights, weights.new_tensor(float(num_tokens)))
        share = share * (1.0 if rows else 0.0)
        metrics.add_mean("ptx_loss", share, 0.0)
        return self.coef * share


def load_mixed_rows(
    path: str, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> list[SupervisedRow]:
    """Return the rows to mix in, rendered and marked like those of `lightrft sft`.

    Plain texts, which are trained whole, are cut at the longest sequence of the run; other rows
    that are longer are left out.

    Args:
        path: Source of rows; its split train is used.
        tokenizer: Tokenizer of the actor.
        config: Options; `pretrain_column`, `apply_chat_template`, `chat_template`,
            `prompt_max_len` and `generate_max_len` are read.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    rows = [_with_text(row, config.pretrain_column) for row in read_rows(path)]
    kind, most = kind_of(rows[0]), config.prompt_max_len + config.generate_max_len
    most = min(most, config.max_len or most)
    if len(TRAINABLE[kind]) < 2 or kind == "token ids":  # no turns: prompts alone are rendered
        config = config.replaced({"apply_chat_template": False, "chat_template": None})
    encoder = RowEncoder(tokenizer, config, kind)
    encoded = [each for row in rows for each in encoder.rows(row)]
    if kind == _TEXT_COLUMN:
        return [
            replace(e, token_ids=e.token_ids[:most], is_trained=e.is_trained[:most])
            for e in encoded
        ]
    kept = [each for each in encoded if len(each.token_ids) <= most]
    if not kept:
        raise DataError(
            f"{path}: all {len(encoded)} rows of pretrain_data are longer than prompt_max_len + "
            f"generate_max_len = {most} tokens: raise one of them"
        )
    return kept


def _with_text(row: Row, column: str) -> Row:
    """Return the row with the text of its column `pretrain_column`."""
    if column == _TEXT_COLUMN:
        return row
    text = row.columns.get(column)
    if not isinstance(text, str):
        raise DataError(
            f"{row.location}: expected a text in column {column!r}, found "
            f"{', '.join(map(repr, row.columns))}; set --pretrain_column"
        )
    return replace(row, columns={_TEXT_COLUMN: text})
