"""Rows of process rewards: an answer in steps, each with a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config import RowDataOptions
from lightrft.datasets.chat_ids import end_of_turn
from lightrft.datasets.files import Row
from lightrft.datasets.judged_rows import JudgementKind
from lightrft.datasets.row_data import RowMediaReader, SupervisedRow
from lightrft.datasets.supervised_rows import hash_of
from lightrft.datasets.text_ids import TextIds
from lightrft.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS, SEPARATOR = "completions", "\n"


@dataclass(frozen=True, slots=True)
class LabelledSteps:
    """Answer behind its prompt, with the labels of its steps.

    Args:
        answer: Row whose trained tokens are the last ones of the steps.
        labels: Label of each step: whether it is right.
    """

    answer: SupervisedRow
    labels: tuple[bool, ...]

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The answer."""
        return (self.answer,)


def step_reader(
    tokenizer: PreTrainedTokenizerBase,
    config: RowDataOptions,
    first: Row,
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> Callable[[Row], LabelledSteps]:
    """Return a reader of labelled steps; see `PreferenceReader`."""
    if config.apply_chat_template or config.chat_template or not tokenizer.is_fast:
        raise DataError(
            "rows in steps are texts, read by a fast tokenizer that knows the place of each token: "
            "leave apply_chat_template and chat_template out, or give whole answers"
        )

    encode = TextIds(tokenizer, end_of_turn(tokenizer))

    def read(row: Row) -> LabelledSteps:
        if reader is not None:
            reader.refuse(row, config, "labelled steps")
        return _labelled(row, encode)

    return read


def _labelled(row: Row, encode: TextIds) -> LabelledSteps:
    prompt, steps, labels = (row.columns.get(name) for name in ("prompt", STEPS, "labels"))
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels):
        raise DataError(
            f"{row.location}: completions and labels must be lists of one length: got "
            f"{str(steps)[:80]!r} and {str(labels)[:80]!r}"
        )
    if not all(isinstance(each, bool) for each in labels):
        raise DataError(f"{row.location}: labels must be true or false: got {str(labels)[:80]!r}")
    texts = [each for each in steps if isinstance(each, str) and each]
    if not isinstance(prompt, str) or not texts or len(texts) < len(steps):
        raise DataError(
            f"{row.location}: prompt must be a text, and completions texts that are not empty: got "
            f"{str(prompt)[:80]!r} and {str(steps)[:80]!r}"
        )
    answer = _encoded(prompt, texts, encode)
    if answer.num_trained != len(texts):
        raise DataError(
            f"{row.location}: the tokenizer ends two steps in one token: give longer steps"
        )
    return LabelledSteps(answer, tuple(labels))


def _encoded(prompt: str, texts: Sequence[str], encode: TextIds) -> SupervisedRow:
    whole = encode(prompt + SEPARATOR.join(texts))
    token_ids, stops = whole.token_ids, whole.stops
    is_end = np.zeros(len(token_ids), dtype=np.bool_)
    is_end[-1] = True
    lengths = (len(text) + len(SEPARATOR) for text in texts[:-1])
    for place in list(accumulate(lengths, initial=len(prompt)))[1:]:
        is_end[next(token for token, stop in enumerate(stops) if stop >= place)] = True
    ids = np.array(token_ids, dtype=np.int32)
    return SupervisedRow(ids, is_end, remarks=whole.remarks, prompt=hash_of(prompt))


def _describe(found: Sequence[LabelledSteps]) -> str:
    num_steps = sum(len(each.labels) for each in found)
    return f"{num_steps} labelled steps in {len(found)} answers"


LABELLED_STEPS = JudgementKind(step_reader, _describe)
