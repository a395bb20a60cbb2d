"""Rows of judgements of one kind, in the order of their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from lightrft.config import RowRunOptions
from lightrft.datasets.files import Row
from lightrft.datasets.messages import ReadRecord
from lightrft.datasets.prompt_sampler import weight_of
from lightrft.datasets.row_data import RowData, RowGroup, RowMediaReader, dropped
from lightrft.datasets.supervised_rows import remark_of
from lightrft.datasets.types import DataError
from lightrft.engines.media.text_encoder import TEXT_ENCODER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Judgement = TypeVar("Judgement", bound=RowGroup)


@dataclass(frozen=True, slots=True)
class JudgementKind(Generic[Judgement]):
    """Kind of judgements.

    Args:
        build_reader: Builds a reader of judgements from the first row; see `PreferenceReader`.
        describe: Returns a line with their numbers.
    """

    build_reader: Callable[
        [PreTrainedTokenizerBase, RowRunOptions, Row, int | None, RowMediaReader | None],
        Callable[[Row], Judgement],
    ]
    describe: Callable[[Sequence[Judgement]], str]

    def of(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        config: RowRunOptions,
        *,
        path: str,
        vocab_size: int | None,
        reader: RowMediaReader | None,
    ) -> RowData[Judgement]:
        """Return the judgements of rows, except those with more than `max_row_tokens` tokens.

        Args:
            rows: Rows of this kind.
            path: Path of the rows, for messages.
            tokenizer, config, vocab_size, reader: See `load_preferences`.

        Raises:
            DataError: A row cannot be used, or all are too long.
        """
        judgement_of = self.build_reader(tokenizer, config, rows[0], vocab_size, reader)
        record = ReadRecord()
        watched = [*map(record.watch, rows)]
        every = [(judgement_of(row), weight_of(row, config)) for row in watched]
        limit = config.max_row_tokens
        sizes = [max(len(row.token_ids) for row in one.rows) for one, _ in every]
        fits = [each for each, size in zip(every, sizes, strict=True) if size <= limit]
        kept, weights = [one for one, _ in fits], [weight for _, weight in fits]
        too_long = [row.location for row, size in zip(rows, sizes, strict=True) if size > limit]
        if not kept:
            raise DataError(
                f"{path}: all {len(every)} rows exceed max_row_tokens = {limit} tokens; "
                "raise --max_row_tokens, up to the model's context"
            )
        remark = remark_of(row for one in kept for row in one.rows)
        parts = f"{path}: {self.describe(kept)}", dropped(too_long), remark
        summary = "; ".join(filter(None, parts))
        encoder = TEXT_ENCODER if reader is None else reader.encoder
        summary = record.added_to(summary, path)
        return RowData(kept, summary, encoder=encoder, weights=weights)
