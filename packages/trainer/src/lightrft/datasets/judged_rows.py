"""Rows of judgements of one kind, in the order of their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row
from lightrft.datasets.messages import ReadRecord
from lightrft.datasets.row_media import RowMediaReader
from lightrft.datasets.supervised_rows import SupervisedRow, remark_of
from lightrft.datasets.types import DataError
from lightrft.engines.media.encoder import TEXT_ENCODER, Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Judged(Protocol):
    @property
    def rows(self) -> tuple[SupervisedRow, ...]: ...


Judgement = TypeVar("Judgement", bound=_Judged)


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


@dataclass(frozen=True, slots=True)
class JudgementKind(Generic[Judgement]):
    """One kind of judgements.

    Args:
        build_reader: The way from rows like the first one to judgements; see `PreferenceReader`.
        describe: Counts them, in a line.
        is_paired: They compare answers.
    """

    build_reader: Callable[
        [PreTrainedTokenizerBase, TrainConfig, Row, int | None, RowMediaReader | None],
        Callable[[Row], Judgement],
    ]
    describe: Callable[[Sequence[Judgement]], str]
    is_paired: bool = False

    def of(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        *,
        path: str,
        vocab_size: int | None,
        reader: RowMediaReader | None,
    ) -> JudgedRows[Judgement]:
        """The judgements of rows; those with a row of more than `max_row_tokens` are left out.

        Args:
            rows: Of this kind.
            path: Of the rows, for messages.
            tokenizer, config, vocab_size, reader: See `load_preferences`.

        Raises:
            DataError: A row cannot be used, or all are too long.
        """
        judgement_of = self.build_reader(tokenizer, config, rows[0], vocab_size, reader)
        record = ReadRecord()
        every = [judgement_of(row) for row in map(record.watch, rows)]
        limit = config.max_row_tokens
        found = [one for one in every if max(len(row.token_ids) for row in one.rows) <= limit]
        if not found:
            raise DataError(
                f"{path}: all {len(every)} rows exceed max_row_tokens = {limit} tokens; "
                "raise --max_row_tokens, up to the model's context"
            )
        summary = f"{path}: {self.describe(found)}"
        if len(found) < len(every):
            summary += f"; dropped {len(every) - len(found)} over-long"
        remark = remark_of(row for one in found for row in one.rows)
        summary = "; ".join(filter(None, (summary, remark)))
        encoder = TEXT_ENCODER if reader is None else reader.encoder
        summary = record.added_to(summary, path)
        return JudgedRows(found, summary, is_paired=self.is_paired, encoder=encoder)
