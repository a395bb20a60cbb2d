"""Rows of rankings: several answers to one prompt, of which some may be equally good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config import TrainConfig
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.judged_rows import JudgedRows, count_dropped, within_limit
from lightrft.datasets.supervised_rows import RowEncoder, SupervisedRow, read_messages
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class RankedAnswers:
    """Answers to one prompt.

    Args:
        rows: Two answers or more, each behind the prompt.
        ranks: Of each; 1 is better than 2, and equal ones are ties.
    """

    rows: tuple[SupervisedRow, ...]
    ranks: tuple[float, ...]


def load_ranked(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
) -> JudgedRows[RankedAnswers]:
    """Reads rows with prompt, answers and ranks, as token ids.

    A prompt is a text or a list of messages, after which each answer is an assistant's message.
    Rankings with an answer of more than `max_row_tokens` are left out and counted.

    Args:
        path, tokenizer, config, max_samples, split, probabilities: See `load_preferences`.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    is_chat = not isinstance(read[0].columns.get("prompt"), str)
    encoder = RowEncoder(tokenizer, config, "messages" if is_chat else "prompt and completion")
    every = [_ranking(row, encoder) for row in read[:max_samples]]
    found = [each for each in every if within_limit(each.rows, config)]
    dropped = count_dropped(path, len(every), len(found), config)
    num_answers = sum(len(each.rows) for each in found)
    summary = f"{path}: {num_answers} answers in {len(found)} rankings{dropped}"
    return JudgedRows(found, summary, is_paired=True)


def _ranking(row: Row, encoder: RowEncoder) -> RankedAnswers:
    answers, ranks = _list(row, ANSWERS), _list(row, "ranks")
    if len(answers) != len(ranks) or len(answers) < 2:
        raise DataError(
            f"{row.location}: expected two answers or more, and a rank of each: got {len(answers)} "
            f"answers and {len(ranks)} ranks"
        )
    numbers = [float(each) for each in ranks if isinstance(each, int | float)]
    if len(numbers) < len(ranks) or not all(map(math.isfinite, numbers)):
        raise DataError(f"{row.location}: ranks must be finite numbers: got {str(ranks)[:80]!r}")
    rows = tuple(_answer(row, answer, encoder) for answer in answers)
    if len({answer.token_ids.tobytes() for answer in rows}) < len(rows):
        raise DataError(f"{row.location}: two answers are the same tokens: leave one out")
    return RankedAnswers(rows, tuple(numbers))


def _list(row: Row, name: str) -> Sequence[object]:
    values = row.columns.get(name)
    if not isinstance(values, list | tuple):
        raise DataError(
            f"{row.location}: column {name!r} must hold a list: got {str(values)[:80]!r}"
        )
    return values


def _answer(row: Row, answer: object, encoder: RowEncoder) -> SupervisedRow:
    prompt = row.columns.get("prompt")
    if not isinstance(answer, str) or not answer or prompt is None:
        raise DataError(
            f"{row.location}: each of the answers must be a text after a prompt: got "
            f"{str(answer)[:80]!r} after {str(prompt)[:80]!r}"
        )
    columns: dict[str, object] = {"prompt": prompt, "completion": answer}
    start = 0
    if encoder.kind == "messages":
        try:
            messages = read_messages(prompt, "prompt")
        except DataError as err:
            raise DataError(f"{row.location}: {err}") from err
        start = len(messages)
        columns = {"messages": [*messages, {"role": "assistant", "content": answer}]}
    return next(encoder.rows(Row(columns, row.location), start=start))
