"""Rows of rankings: several answers to one prompt, some of which may be equally good."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightrft.config import RowDataOptions
from lightrft.datasets.files import Row
from lightrft.datasets.judged_rows import JudgementKind
from lightrft.datasets.messages import ASSISTANT, read_conversation, read_messages
from lightrft.datasets.row_data import RowMediaReader, SupervisedRow
from lightrft.datasets.supervised_rows import RowEncoder
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class RankedAnswers:
    """Answers to one prompt.

    Args:
        rows: Two answers or more, each behind the prompt.
        ranks: Rank of each; 1 is better than 2, and equal ones are ties.
        by_name: Ranks of several scores by name, instead of `ranks`; a score may have none.
    """

    rows: tuple[SupervisedRow, ...]
    ranks: tuple[float, ...] = ()
    by_name: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def ranks_of(self, name: str) -> tuple[float, ...]:
        """Return the ranks of a score, () without; "" is the only one."""
        return self.by_name.get(name, ()) if name else self.ranks


def _ranking(row: Row, encoder: RowEncoder, names: Collection[str]) -> RankedAnswers:
    answers = _list(ANSWERS, row.columns.get(ANSWERS))
    ranks_of_row = row.columns.get("ranks")
    if isinstance(ranks_of_row, Mapping) != bool(names):
        wanted = f"an object with ranks by name ({', '.join(names)})" if names else "a list"
        raise DataError(f"ranks must hold {wanted}: got {str(ranks_of_row)[:80]!r}")
    # Parquet fills absent fields with null.
    lists = (
        {k: v for k, v in ranks_of_row.items() if v is not None}
        if isinstance(ranks_of_row, Mapping)
        else {}
    )
    if names and (not lists or not lists.keys() <= set(names)):
        raise DataError(
            f"ranks must be of {', '.join(names)}: got {', '.join(map(str, lists)) or 'none'}; "
            "name them in reward_heads"
        )
    by_name = {name: _ranks(each, len(answers)) for name, each in lists.items()}
    ranks = () if names else _ranks(ranks_of_row, len(answers))
    rows = tuple(_answer(row, answer, encoder) for answer in answers)
    if len({answer.token_ids.tobytes() for answer in rows}) < len(rows):
        raise DataError("two answers are the same tokens: leave one out")
    return RankedAnswers(rows, ranks, by_name)


def ranking_reader(
    tokenizer: PreTrainedTokenizerBase,
    config: RowDataOptions,
    first: Row,
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
    *,
    names: Collection[str] = (),
) -> Callable[[Row], RankedAnswers]:
    """Return a reader of rankings for rows like the first; see `PreferenceReader`."""
    is_chat = not isinstance(first.columns.get("prompt"), str)
    kind = "messages" if is_chat else "prompt and completion"
    encoder = RowEncoder(tokenizer, config, kind, reader=reader)

    def read(row: Row) -> RankedAnswers:
        with row.placed():
            return _ranking(row, encoder, names)

    return read


def _ranks(given: object, num_answers: int) -> tuple[float, ...]:
    ranks = _list("ranks", given)
    if num_answers != len(ranks) or num_answers < 2:
        raise DataError(
            f"expected two answers or more, and a rank of each: got {num_answers} answers and "
            f"{len(ranks)} ranks"
        )
    # True and false are integers, too, but no ranks.
    numbers = tuple(
        float(each)
        for each in ranks
        if isinstance(each, int | float) and not isinstance(each, bool)
    )
    if len(numbers) < len(ranks) or not all(map(math.isfinite, numbers)):
        raise DataError(f"ranks must be finite numbers: got {str(ranks)[:80]!r}")
    return numbers


def _list(name: str, values: object) -> Sequence[object]:
    if not isinstance(values, list | tuple):
        raise DataError(f"column {name!r} must hold a list: got {str(values)[:80]!r}")
    return values


def _answer(row: Row, answer: object, encoder: RowEncoder) -> SupervisedRow:
    prompt = row.columns.get("prompt")
    if not isinstance(answer, str) or not answer or prompt is None:
        raise DataError(
            f"each of the answers must be a text after a prompt: got {str(answer)[:80]!r} after "
            f"{str(prompt)[:80]!r}"
        )
    columns: dict[str, object] = {"prompt": prompt, "completion": answer}
    start = 0
    if encoder.kind == "messages":
        talk = read_conversation(row.columns, "prompt")
        start = len(talk.messages)
        columns = {"messages": talk + read_messages({ANSWERS: answer}, ANSWERS, speaker=ASSISTANT)}
    return next(encoder.rows(encoder.with_media_of(row, columns, row.location), start=start))


def _describe(found: Sequence[RankedAnswers]) -> str:
    return f"{sum(len(each.rows) for each in found)} answers in {len(found)} rankings"


RANKED = JudgementKind(ranking_reader, _describe)
