"""Rows of preferences: pairs of answers to one prompt, or answers that are labelled one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightrft.config import RowDataOptions
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.messages import (
    ASSISTANT,
    Conversation,
    Message,
    ReadRecord,
    in_context,
    named_columns,
    read_conversation,
    read_messages,
)
from lightrft.datasets.prompt_sampler import weight_of
from lightrft.datasets.row_data import RowData, RowMediaReader, SupervisedRow, dropped
from lightrft.datasets.supervised_rows import (
    RowEncoder,
    answer_of_ids,
    finite_number,
    remark_of,
    shown_by_ids,
    text_of,
)
from lightrft.datasets.types import DataError
from lightrft.engines.media.text_encoder import TEXT_ENCODER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAME_ANSWERS = "chosen and rejected are the same"
_TEXTS, _CHATS, _IDS = "prompt and completion", "messages", "token ids"
_PAIR_OF_IDS = ("chosen_ids", "rejected_ids")
_LABELLED_IDS = ("response_ids",)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt; their trained tokens are those of the answers.

    Args:
        chosen, rejected: Better and worse answer, each behind the prompt.
        margin: Difference in quality, at least 0; None is unknown.
    """

    chosen: SupervisedRow
    rejected: SupervisedRow
    margin: float | None = None

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """Both answers."""
        return self.chosen, self.rejected

    @property
    def labels(self) -> tuple[bool, ...]:
        """Return whether each answer is the good one."""
        return True, False


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """Answer behind its prompt, and whether it is good."""

    answer: SupervisedRow
    is_good: bool

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The answer."""
        return (self.answer,)

    @property
    def labels(self) -> tuple[bool, ...]:
        """Return whether it is a good one."""
        return (self.is_good,)


Preference = PreferencePair | LabelledAnswer


def load_preferences(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: RowDataOptions,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> RowData[Preference]:
    """Read pairs (chosen, rejected) or labelled answers (completion, label), as token ids.

    Answers and prompts are texts, lists of messages or token ids. Conversations that
    do not begin with an assistant's message hold their prompt: the part that both share. A pair
    with an answer of more than `max_row_tokens` is left out and counted.

    Args:
        path: Source, like `prompt_data`.
        tokenizer: Tokenizer; a fast one if answers are texts.
        config: Options; `apply_chat_template`, `chat_template`, `max_row_tokens` and `seed` are
            read.
        max_samples: Use at most this many rows of the data, from the start.
        split, probabilities: See `read_sources`.
        vocab_size, reader: See `load_supervised`.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    preferences = PreferenceReader(tokenizer, config, read[0], vocab_size, reader)
    preference_list: list[Preference] = []
    weights, too_long = list[float](), []
    record = ReadRecord()
    for row in map(record.watch, read[:max_samples]):
        each = preferences(row)
        if max(len(part.token_ids) for part in each.rows) > config.max_row_tokens:
            too_long.append(row.location)
        else:
            preference_list.append(each)
            weights.append(weight_of(row, config))
    kind = "pairs" if preferences.is_paired else "labelled answers"
    if not preference_list:
        raise DataError(
            f"{path}: all {len(too_long)} {kind} exceed max_row_tokens = {config.max_row_tokens} "
            "tokens; raise --max_row_tokens, up to the model's context"
        )
    trained = sum(part.num_trained for each in preference_list for part in each.rows)
    tokens = sum(len(part.token_ids) for each in preference_list for part in each.rows)
    summary = f"{path}: {len(preference_list)} {kind}, {trained} of {tokens} tokens are of answers"
    remark = remark_of(part for each in preference_list for part in each.rows)
    summary = "; ".join(filter(None, (summary, dropped(too_long), remark)))
    summary = record.added_to(summary, path)
    encoder = TEXT_ENCODER if reader is None else reader.encoder
    return RowData(preference_list, summary, encoder=encoder, weights=weights)


class PreferenceReader:
    """Reader of rows of one kind as preferences; it refuses rows of another.

    Args:
        tokenizer, config, vocab_size, reader: See `load_preferences`.
        first: Row that decides the kind.

    Raises:
        DataError: The row is of no kind, or the options do not fit its kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: RowDataOptions,
        first: Row,
        vocab_size: int | None = None,
        reader: RowMediaReader | None = None,
    ) -> None:
        self._config, self._media = config, reader
        self._answers, columns = _answer_columns(first), first.columns
        self.is_paired, self._vocab_size = len(self._answers) == 2, vocab_size
        texts = (columns.get("prompt"), columns[self._answers[0]])
        self._kind = _TEXTS if all(isinstance(each, str) for each in texts) else _CHATS
        if self._answers in (_PAIR_OF_IDS, _LABELLED_IDS):
            self._kind = _IDS
        self._encoder = RowEncoder(tokenizer, config, self._kind, reader=reader)

    def __call__(self, row: Row) -> Preference:
        """Return the preference of a row; errors begin with its place.

        Raises:
            DataError: The row cannot be used.
        """
        with row.placed():
            return self._preference(row)

    def _preference(self, row: Row) -> Preference:
        columns = row.columns
        if _answer_columns(row) != self._answers:
            raise DataError(
                "expected rows like the first: pairs only, or labelled answers only, and texts "
                "only, or token ids only"
            )
        if not self.is_paired:
            answer, label = columns[self._answers[0]], columns["label"]
            if not isinstance(label, bool) and label not in (0, 1):
                raise DataError(f"column 'label' must be true or false: got {label!r}")
            if self._kind == _IDS:
                return LabelledAnswer(self._ids(row)[0], bool(label))
            if self._kind == _TEXTS:
                return LabelledAnswer(self._text(row, "completion"), bool(label))
            chat, start = _labelled_chat(columns, answer)
            made = self._encoded(row, "completion", {"messages": chat}, start)
            return LabelledAnswer(made, bool(label))
        if self._kind == _IDS:
            chosen, rejected = self._ids(row)
        elif self._kind == _TEXTS:
            chosen, rejected = self._text(row, "chosen"), self._text(row, "rejected")
        else:
            chats, start = paired_chats(columns)
            chosen, rejected = (
                self._encoded(row, name, {"messages": chat}, start)
                for name, chat in zip(("chosen", "rejected"), chats, strict=True)
            )
        if np.array_equal(chosen.token_ids, rejected.token_ids):
            raise DataError(f"{SAME_ANSWERS} tokens: leave the row out")
        return PreferencePair(chosen, rejected, _margin(columns))

    def _ids(self, row: Row) -> list[SupervisedRow]:
        shown = shown_by_ids(row, self._config, self._media, "answers of token ids")
        return [answer_of_ids(row.columns, name, self._vocab_size, shown) for name in self._answers]

    def _text(self, row: Row, name: str) -> SupervisedRow:
        texts = {"prompt": text_of(row.columns, "prompt"), "completion": text_of(row.columns, name)}
        return self._encoded(row, name, texts, 0)

    def _encoded(
        self, row: Row, name: str, columns: Mapping[str, object], start: int
    ) -> SupervisedRow:
        location = f"{row.location}, {name}"
        row_of_answer = self._encoder.with_media_of(row, columns, location)
        made = list(self._encoder.rows(row_of_answer, start=start))
        if len(made) > 1:
            raise DataError(
                f"{location}: the chat template shows earlier turns otherwise than they were: give "
                "answers of one turn"
            )
        return made[0]


def _answer_columns(row: Row) -> tuple[str, ...]:
    """Return the columns of both answers of a pair, or of a labelled one.

    Raises:
        DataError: The row is neither.
    """
    present = {name for name, value in row.columns.items() if value is not None}
    if {"prompt_ids", *_PAIR_OF_IDS} <= present:
        return _PAIR_OF_IDS
    if {"chosen", "rejected"} <= present:
        return "chosen", "rejected"
    if {"prompt", "completion", "label"} <= present:
        return ("completion",)
    if {"prompt_ids", *_LABELLED_IDS, "label"} <= present:
        return _LABELLED_IDS
    raise DataError(
        f"{row.location}: expected columns chosen and rejected (and prompt), or prompt_ids, "
        "chosen_ids and rejected_ids, or prompt, completion and label, or prompt_ids, "
        f"response_ids and label; found {named_columns(row.columns)}"
    )


def paired_chats(columns: Mapping[str, object]) -> tuple[tuple[Conversation, ...], int]:
    """Return both conversations of a pair of texts or messages, and the length of their prompt.

    Raises:
        DataError: They are not two answers to one prompt.
    """
    talks = [read_messages(columns, name, speaker=ASSISTANT) for name in ("chosen", "rejected")]
    chosen, rejected = (talk.messages for talk in talks)
    begins = {each[0]["role"] == ASSISTANT for each in (chosen, rejected)}
    if begins == {True}:
        prompt = _prompt(columns)
        return tuple(prompt + talk for talk in talks), len(prompt.messages)
    pairs = zip(chosen, rejected, strict=False)
    start = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise DataError(f"{SAME_ANSWERS} messages: leave the row out")
    for name, chat in (("chosen", chosen), ("rejected", rejected)):
        if len(chat) == start or chat[start]["role"] != ASSISTANT:
            raise DataError(
                f"chosen and rejected part at message {start + 1}, which of {name} is no "
                "assistant's: expected two answers to the same messages"
            )
    _check_prompt(columns, chosen[:start])
    whole = tuple(in_context(columns, talk) for talk in talks)
    return whole, start + len(whole[0].messages) - len(chosen)


def _labelled_chat(columns: Mapping[str, object], answer: object) -> tuple[Conversation, int]:
    """Return a conversation, and how many messages of it are the prompt."""
    prompt, talk = _prompt(columns), read_messages(columns, "completion", speaker=ASSISTANT)
    if talk.messages[0]["role"] != ASSISTANT:
        raise DataError(
            f"column 'completion' must begin with an assistant's message: got {str(answer)[:80]!r}"
        )
    return prompt + talk, len(prompt.messages)


def _prompt(columns: Mapping[str, object]) -> Conversation:
    if columns.get("prompt") is None:
        raise DataError("the answers need a prompt before them: give a column prompt")
    return read_conversation(columns, "prompt", speaker="user")


def _check_prompt(columns: Mapping[str, object], shared: Sequence[Message]) -> None:
    """Raise a DataError if column `prompt` differs from the part that both conversations share."""
    if columns.get("prompt") is None:
        return
    prompt = read_messages(columns, "prompt", speaker="user").messages
    if any(each not in shared for each in prompt):
        raise DataError(
            "chosen and rejected hold a prompt of their own, and it is not that of column "
            "'prompt': leave one of them out"
        )


def _margin(columns: Mapping[str, object]) -> float | None:
    """Return how much better the chosen answer is, from the column `margin`.

    Scores only tell which one is better: a margin must have the scale of the trained scores.
    """
    margin, better, worse = (
        _finite(columns, name) for name in ("margin", "score_chosen", "score_rejected")
    )
    if better is not None and worse is not None and better <= worse:
        raise DataError(
            f"score_chosen must be more than score_rejected: got {better:g} and {worse:g}; swap "
            "the answers, or leave the row out"
        )
    if margin is not None and margin < 0:
        raise DataError(
            f"the chosen answer is worse than the rejected one, by {-margin:g}: swap them, or "
            "leave the row out"
        )
    return margin


def _finite(columns: Mapping[str, object], name: str) -> float | None:
    return None if columns.get(name) is None else finite_number(columns, name)
