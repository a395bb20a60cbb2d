"""Rows of scores: an answer as token ids, and a number for its quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config import MediaOptions, RowRunOptions
from lightrft.datasets.files import Row
from lightrft.datasets.judged_rows import JudgementKind
from lightrft.datasets.row_data import RowMediaReader, SupervisedRow
from lightrft.datasets.supervised_rows import RowEncoder, answer_of_ids, finite_number, shown_by_ids
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSE = "response_ids"


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """Answer behind its prompt, and its score."""

    answer: SupervisedRow
    score: float

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The answer."""
        return (self.answer,)


def score_reader(
    tokenizer: PreTrainedTokenizerBase,
    config: RowRunOptions,
    first: Row,
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> Callable[[Row], ScoredAnswer]:
    """Return a reader of scored answers; see `PreferenceReader`."""
    # It refuses options that change how texts are encoded.
    RowEncoder(tokenizer, config, "token ids")
    is_label = config.reward_loss in (None, "bce")

    def read(row: Row) -> ScoredAnswer:
        return _scored(row, vocab_size, config, reader, is_label=is_label)

    return read


def _scored(
    row: Row,
    vocab_size: int | None,
    config: MediaOptions,
    reader: RowMediaReader | None,
    *,
    is_label: bool,
) -> ScoredAnswer:
    columns = row.columns
    missing = [name for name in ("prompt_ids", RESPONSE, "score") if columns.get(name) is None]
    with row.placed():
        if missing:
            raise DataError(f"expected prompt_ids, response_ids and score: {missing[0]} is missing")
        score = finite_number(columns, "score")
        if is_label and score not in (0, 1):
            raise DataError(
                f"reward_loss bce takes scores of 0 and 1: got {score:g}; give --reward_loss mse"
            )
        shown = shown_by_ids(row, config, reader, "scores of token ids")
        return ScoredAnswer(answer_of_ids(columns, RESPONSE, vocab_size, shown), score)


SCORED = JudgementKind(score_reader, lambda found: f"{len(found)} scored answers")
