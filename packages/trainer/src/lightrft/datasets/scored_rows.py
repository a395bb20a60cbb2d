"""Rows of scores: an answer as token ids, and a number that says how good it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.judged_rows import JudgedRows, count_dropped, within_limit
from lightrft.datasets.row_media import RowMediaReader
from lightrft.datasets.supervised_rows import (
    RowEncoder,
    SupervisedRow,
    answer_of_ids,
    finite_number,
)
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSE = "response_ids"


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer behind its prompt, and its score."""

    answer: SupervisedRow
    score: float

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The answer."""
        return (self.answer,)


def load_scored(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> JudgedRows[ScoredAnswer]:
    """Reads rows with prompt_ids, response_ids and score.

    Args:
        path, tokenizer, config, max_samples, split, probabilities, vocab_size, reader:
            See `load_preferences`; the loss `bce` takes scores of 0 and 1 alone.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    scores = score_reader(tokenizer, config, read[0], vocab_size, reader)
    every = [scores(row) for row in read[:max_samples]]
    found = [each for each in every if within_limit(each.rows, config)]
    dropped = count_dropped(path, len(every), len(found), config)
    return JudgedRows(found, f"{path}: {len(found)} scored answers{dropped}", is_paired=False)


def score_reader(
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    first: Row,
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> Callable[[Row], ScoredAnswer]:
    """The way from rows to scored answers; see `PreferenceReader`."""
    # Refuses options that change how texts are encoded.
    RowEncoder(tokenizer, config, "token ids")
    is_label = config.reward_loss in (None, "bce")

    def read(row: Row) -> ScoredAnswer:
        if reader is not None:
            reader.refuse(row, config, "scores of token ids")
        return _scored(row, vocab_size, is_label=is_label)

    return read


def _scored(row: Row, vocab_size: int | None, *, is_label: bool) -> ScoredAnswer:
    columns = row.columns
    missing = [name for name in ("prompt_ids", RESPONSE, "score") if columns.get(name) is None]
    try:
        if missing:
            raise DataError(f"expected prompt_ids, response_ids and score: {missing[0]} is missing")
        score = finite_number(columns, "score")
        if is_label and score not in (0, 1):
            raise DataError(
                f"reward_loss bce takes scores of 0 and 1: got {score:g}; give --reward_loss mse"
            )
        return ScoredAnswer(answer_of_ids(columns, RESPONSE, vocab_size), score)
    except DataError as err:
        raise DataError(f"{row.location}: {err}") from err
