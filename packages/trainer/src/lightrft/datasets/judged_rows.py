"""Rows of judgements of one kind, in the order of their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch.utils.data import Dataset

from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.datasets.types import DataError
from lightrft.engines.media.encoder import TEXT_ENCODER, Encoder

Judgement = TypeVar("Judgement")


class JudgedRows(Dataset[int], Generic[Judgement]):
    """Judgements; an item is the position of one.

    Args:
        rows: All of them.
        summary: One line about what became of the data.
        is_paired: They compare answers.
        encoder: Of their media.
    """

    def __init__(
        self,
        rows: Sequence[Judgement],
        summary: str,
        *,
        is_paired: bool,
        encoder: Encoder = TEXT_ENCODER,
    ) -> None:
        self.rows, self.summary, self.is_paired = tuple(rows), summary, is_paired
        self.encoder = encoder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index


def within_limit(rows: Sequence[SupervisedRow], config: TrainConfig) -> bool:
    """Whether no row has more than `max_row_tokens`."""
    return max(len(row.token_ids) for row in rows) <= config.max_row_tokens


def count_dropped(path: str, num_read: int, num_kept: int, config: TrainConfig) -> str:
    """The end of a summary about rows that were too long.

    Raises:
        DataError: All were.
    """
    if not num_kept:
        raise DataError(
            f"{path}: all {num_read} rows exceed max_row_tokens = {config.max_row_tokens} tokens; "
            "raise --max_row_tokens"
        )
    return f"; dropped {num_read - num_kept} over-long" if num_read > num_kept else ""
