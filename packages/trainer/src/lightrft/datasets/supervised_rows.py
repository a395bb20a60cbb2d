"""Rows of supervised training: token ids, and which of them are trained."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from lightrft.config import MediaOptions, RowDataOptions
from lightrft.datasets.chat_ids import ChatIds, end_of_turn
from lightrft.datasets.chat_turns import ChatTurns, Turn
from lightrft.datasets.files import Row, read_sources
from lightrft.datasets.media import Content, MediaRow, as_parts, media_columns
from lightrft.datasets.messages import (
    ASSISTANT,
    Conversation,
    Message,
    ReadRecord,
    alpaca_turns,
    like,
    named_columns,
    note_unread_keys,
    read_conversation,
    read_messages,
    renaming,
    require_asked,
    with_texts,
)
from lightrft.datasets.prompt_sampler import weight_of
from lightrft.datasets.render import teacher_name
from lightrft.datasets.row_data import (
    NOTHING_SHOWN,
    RowData,
    RowMediaReader,
    ShownMedia,
    SupervisedRow,
    dropped,
)
from lightrft.datasets.text_ids import TextIds, counted
from lightrft.datasets.types import DataError
from lightrft.engines.media.media import Media
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTHING_TRAINED = "no token is trained"
# Columns of each kind of row; if a row has several kinds, the first counts.
KINDS: dict[str, tuple[str, ...]] = {
    "token ids": ("token_ids", "is_trained"),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
    "instruction and output": ("instruction", "output"),
}
_PAIR, _TALK = "prompt and completion", "prompt and completion as messages"
# Trainable parts of each kind, the default first.
_CHAT = ("assistant", "last_assistant", "all")
TRAINABLE: dict[str, tuple[str, ...]] = {
    "token ids": ("completion", "all"),
    "messages": _CHAT,
    "conversations": _CHAT,
    _PAIR: ("completion", "all"),
    _TALK: ("completion", "all"),
    "text": ("all",),
    "instruction and output": _CHAT,
}


def load_supervised(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: RowDataOptions,
    *,
    max_samples: int,
    split: str,
    probabilities: Sequence[float] = (),
    vocab_size: int | None = None,
    reader: RowMediaReader | None = None,
) -> RowData[SupervisedRow]:
    """Read rows, render them and mark the trained tokens.

    Rows of more than `max_row_tokens` are left out and counted.

    Args:
        path: Source, like `prompt_data`.
        tokenizer: Tokenizer; a fast one if rows have prompt and completion.
        config: Options; `train_on`, `apply_chat_template`, `chat_template`, `max_row_tokens` and
            `seed` are read.
        max_samples: Use at most this many rows of the data, from the start.
        split, probabilities: See `read_sources`.
        vocab_size: Vocabulary size, which bounds the ids of rows of token ids; None is no bound.
        reader: Reader of images and videos; None reads no media.

    Raises:
        DataError: A row cannot be used, or all are too long.
    """
    read = read_sources(path, split=split, probabilities=probabilities, seed=config.seed)
    rows, weights, too_long, num_split = [], list[float](), [], 0
    encoder = RowEncoder(tokenizer, config, kind_of(read[0]), vocab_size, reader)
    record = ReadRecord()
    for row in map(record.watch, read[:max_samples]):
        made = list(encoder.rows(row))
        if config.teachers:
            name = teacher_name(row.columns, config, row.location)
            made = [replace(each, teacher=name) for each in made]
        num_split += len(made) > 1
        for each in made:
            if len(each.token_ids) > config.max_row_tokens:
                too_long.append(row.location)
            else:
                rows.append(each)
                weights.append(weight_of(row, config))
    if not rows:
        what = (
            f"all {len(too_long)} rows exceed max_row_tokens = {config.max_row_tokens} tokens; "
            "raise --max_row_tokens, up to the model's context"
            if too_long
            else f"train_on_regex {config.train_on_regex!r} matches no token"
        )
        raise DataError(f"{path}: {what}")
    parts = _summary(encoder, rows, num_split), dropped(too_long)
    summary = record.added_to(f"{path}: {'; '.join(filter(None, parts))}", path)
    return RowData(rows, summary, encoder=encoder.media_encoder, weights=weights)


def _summary(encoder: RowEncoder, found: Sequence[SupervisedRow], num_split: int) -> str:
    trained = sum(each.num_trained for each in found)
    tokens = sum(len(each.token_ids) for each in found)
    text = (
        f"{len(found)} rows ({encoder.kind}), {trained} of {tokens} tokens trained "
        f"({encoder.train_on})"
    )
    if num_split:
        text += (
            f"; {num_split} conversations in one row per turn, since the chat template shows "
            "earlier turns otherwise than they were"
        )
    num_shown = sum(each.shown is not None for each in found)
    if num_shown:
        text += f"; {num_shown} with images or videos"
    if encoder.num_unmatched:
        text += f"; dropped {encoder.num_unmatched} without a match of train_on_regex"
    return "; ".join(filter(None, (text, remark_of(found))))


def hash_of(prompt: str) -> bytes:
    """Return the hash of a prompt's text; b"" for ""."""
    return hashlib.blake2b(prompt.encode(), digest_size=16).digest() if prompt else b""


def remark_of(rows: Iterable[SupervisedRow]) -> str:
    """Return how many texts were read differently than written, in one line; "" if none."""
    return counted(remark for row in rows for remark in row.remarks)


def kind_of(row: Row) -> str:
    """Return the kind of a row, by its columns.

    Raises:
        DataError: The row is of no kind.
    """
    present = {name for name, value in row.columns.items() if value is not None}
    for kind, columns in KINDS.items():
        if present.issuperset(columns):
            has_lists = any(isinstance(row.columns[name], list) for name in columns)
            return _TALK if kind == _PAIR and has_lists else kind
    raise DataError(
        f"{row.location}: expected a column messages, conversations or text, or prompt and "
        "completion, or instruction and output, or token_ids and is_trained; found "
        f"{named_columns(row.columns)}{renaming(row.columns)}"
    )


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Row with one token for each medium.

    Args:
        token_ids, is_trained: Ids and marks of trained tokens, of equal length.
        shown: Text at its beginning, and its media, if any.
        remarks: See `SupervisedRow`.
        prompt: Text before the first trained token; "" is the text of `shown`.
    """

    token_ids: Sequence[int]
    is_trained: Sequence[bool]
    shown: ShownMedia = NOTHING_SHOWN
    remarks: tuple[str, ...] = ()
    prompt: str = ""


def _before(turn: Turn, messages: Sequence[Message], media: Media) -> ShownMedia:
    """Return the text and media that stand before a turn."""
    parts = [
        part.get("type")
        for message in (messages[: turn.num_messages] if media else ())
        for part in as_parts(message["content"])
    ]
    media_before = {kind: media[kind][: parts.count(kind)] for kind in media.kinds}
    return ShownMedia(turn.prompt, Media(media_before))


class RowEncoder:
    """Encoder of rows of one kind as trained tokens; it refuses rows of another.

    Args:
        tokenizer, config, vocab_size, reader: See `load_supervised`.
        kind: Name in `KINDS`.

    Raises:
        DataError: The options do not fit the kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: RowDataOptions,
        kind: str,
        vocab_size: int | None = None,
        reader: RowMediaReader | None = None,
    ) -> None:
        self._config, self._reader = config, reader
        self.kind, self.train_on = kind, config.train_on or TRAINABLE[kind][0]
        self._vocab_size = vocab_size
        if self.train_on not in TRAINABLE[kind]:
            raise DataError(
                f"train_on {self.train_on}: rows with {kind} take {' or '.join(TRAINABLE[kind])}"
            )
        self._tokenizer = tokenizer
        self._in_chat = kind == _TALK or (kind == _PAIR and config.apply_chat_template)
        is_chat = "assistant" in TRAINABLE[kind] or self._in_chat
        uses_template = config.apply_chat_template or config.chat_template
        if uses_template and not is_chat:
            name = "apply_chat_template" if config.apply_chat_template else "chat_template"
            more = ", or add apply_chat_template" if kind == _PAIR else ""
            raise DataError(f"{name}: rows with {kind} have no turns: leave it out{more}")
        if kind == _PAIR and not tokenizer.is_fast:
            raise DataError(
                "rows with prompt and completion need a fast tokenizer, which knows the place of "
                f"each token: got {type(tokenizer).__name__}; give messages instead"
            )
        prompts = None if reader is None else reader.prompts
        self._turns = ChatTurns(ChatIds(tokenizer, prompts)) if is_chat else None
        self._pattern, self.num_unmatched = config.train_on_regex, 0

    def rows(self, row: Row, *, start: int = 0) -> Iterator[SupervisedRow]:
        """Yield the rows to train on from one row of the data; errors begin with its place.

        Args:
            row: Row of the data.
            start: Number of first messages that are only context.

        Raises:
            DataError: The row cannot be used.
        """
        kind = kind_of(row)
        if kind != self.kind and not (self._in_chat and kind in (_PAIR, _TALK)):
            is_mixed = {kind, self.kind} == {_PAIR, _TALK}
            more = "; add apply_chat_template, which takes both" if is_mixed else ""
            raise DataError(
                f"{row.location}: expected {self.kind}, as in the first row: got {kind}{more}"
            )
        with row.placed():
            for each in self._encoded(row, start):
                made = self._row(each, row.location)
                if made is None:
                    self.num_unmatched += 1
                    continue
                if not made.is_trained.any():
                    raise DataError(
                        f"{NOTHING_TRAINED}: expected two tokens or more, one of them trained "
                        "behind the first"
                    )
                yield made

    def _row(self, encoded: _Encoded, location: str) -> SupervisedRow | None:
        """Return the row, or None without a match of the pattern."""
        token_ids = encoded.token_ids
        trained = np.array(encoded.is_trained, dtype=np.bool_)
        trained[:1] = False
        if self._pattern is not None:
            trained &= matched_tokens(self._tokenizer, token_ids, self._pattern)
            if not trained.any():
                return None
        shown = encoded.shown
        if self._reader is not None:
            is_answer = self.train_on != "all"
            trained = self._reader.without_marks(token_ids, trained, is_answer=is_answer)
            if shown.kinds:
                pass  # has a token for each feature already, as in rows of token ids
            elif shown.media:
                token_ids, trained, shown = self._reader.expand(token_ids, trained, shown, location)
            elif not self._reader.marks.isdisjoint(token_ids):
                raise DataError(
                    "the text holds the mark of an image or video, and the row has none there: "
                    "leave it out"
                )
        ids = np.array(token_ids, dtype=np.int32)
        media = shown if shown.media else None
        prompt = hash_of(encoded.prompt or encoded.shown.text)
        return SupervisedRow(ids, trained, media, remarks=encoded.remarks, prompt=prompt)

    @cached_property
    def _texts(self) -> TextIds:
        return TextIds(self._tokenizer, end_of_turn(self._tokenizer))

    @property
    def media_encoder(self) -> Encoder:
        """Encoder of the rows' media."""
        return TEXT_ENCODER if self._reader is None else self._reader.encoder

    def _read(self, row: Row, content: Content) -> MediaRow:
        """Return a text or a conversation of a row with its media."""
        if self._reader is None:
            return MediaRow(content if isinstance(content, str) else with_texts(content), Media())
        return self._reader.read(row, content, self._config)

    def _encoded(self, row: Row, start: int) -> Iterator[_Encoded]:
        columns = row.columns
        if self._turns is not None:
            yield from self._chat(self._turns, row, start)
        elif self.kind == "token ids":
            token_ids = _integers(columns, "token_ids", self._vocab_size)
            shown = None
            if self._reader is not None:
                shown = self._reader.of_ids(row, self._config, token_ids, "rows of token ids")
            flags = _flags(columns["is_trained"])
            if len(flags) != len(token_ids):
                raise DataError(
                    "column 'is_trained' must hold one 0 or 1 for each of token_ids: got "
                    f"{len(flags)} for {len(token_ids)}"
                )
            marks = [self.train_on == "all" or flag == 1 for flag in flags]
            yield _Encoded(token_ids, marks, shown or NOTHING_SHOWN)
        elif self.kind == "text":
            read = self._read(row, text_of(columns, "text"))
            text, media = str(read.content), read.media
            whole = self._texts(text, has_media=bool(media))
            is_trained = [True] * len(whole.token_ids)
            yield _Encoded(whole.token_ids, is_trained, ShownMedia(text, media), whole.remarks)
        else:
            read = self._read(row, text_of(columns, "prompt"))
            completion = text_of(columns, "completion")
            prompt, media = str(read.content), read.media
            whole = self._texts(prompt + completion, has_media=bool(media))
            # A token across the end of the prompt and the beginning of the completion is sampled
            # with the completion.
            first = next(i for i, stop in enumerate([*whole.stops, math.inf]) if stop > len(prompt))
            if self.train_on == "all":
                first = 0
            marks = [place >= first for place in range(len(whole.token_ids))]
            yield _Encoded(whole.token_ids, marks, ShownMedia(prompt, media), whole.remarks)

    def _chat(self, chat: ChatTurns, row: Row, start: int) -> Iterator[_Encoded]:
        talk, begin = self._conversation(row.columns)
        start = start or begin
        require_asked(talk.messages[:start])
        read = self._read(row, talk.messages)
        messages, media = cast("Sequence[Message]", read.content), read.media
        talk = replace(talk, messages=tuple(messages))
        note_unread_keys(row.columns, chat.template.unread_keys(talk.messages, talk.tools))
        if self.train_on == "all":
            if talk.untrained:
                raise DataError(
                    f"message {min(talk.untrained) + 1} is marked untrained, and train_on all "
                    "trains every message: leave one of them out"
                )
            token_ids, text = chat.conversation(talk.messages, talk.tools)
            yield _Encoded(token_ids, [True] * len(token_ids), ShownMedia(text, media))
            return
        turns = chat.turns(talk, start=start, only_last=self.train_on == "last_assistant")
        whole = turns[-1].token_ids
        if all(whole[: len(turn.token_ids)] == turn.token_ids for turn in turns):
            is_trained = np.zeros(len(whole), dtype=np.bool_)
            for turn in turns:
                is_trained[turn.start : len(turn.token_ids)] = True
            shown = _before(turns[-1], messages, media)
            yield _Encoded(whole, is_trained.tolist(), shown, prompt=turns[0].prompt)
            return
        for turn in turns:
            flags = [place >= turn.start for place in range(len(turn.token_ids))]
            yield _Encoded(turn.token_ids, flags, _before(turn, messages, media))

    def _conversation(self, columns: Mapping[str, object]) -> tuple[Conversation, int]:
        """Return the turns of a row, and how many of its messages are a separate prompt."""
        if self.kind == "instruction and output":
            return alpaca_turns(columns), 0
        if not self._in_chat:
            return read_conversation(columns, self.kind), 0
        if isinstance(columns["completion"], str):
            text_of(columns, "completion")
        prompt = read_conversation(columns, "prompt", speaker="user")
        answer = read_messages(columns, "completion", speaker=ASSISTANT)
        return prompt + answer, len(prompt.messages)

    def with_media_of(self, row: Row, columns: Mapping[str, object], location: str) -> Row:
        """Return a row with other columns and the media of this row."""
        names = chain.from_iterable(media_columns(self._config).values())
        media = {name: row.columns[name] for name in names if name in row.columns}
        columns = like({**media, **columns}, row.columns)
        return replace(row, columns=columns, location=location)


def answer_of_ids(
    columns: Mapping[str, object],
    name: str,
    vocab_size: int | None,
    shown: ShownMedia | None = None,
) -> SupervisedRow:
    """Return the ids of a column behind those of `prompt_ids`, the only trained ones.

    Args:
        columns: Columns of a row.
        name: Name of the column.
        vocab_size: See `load_supervised`.
        shown: Media of the prompt, see `shown_by_ids`.

    Raises:
        DataError: A column is empty, or holds something else than ids of the vocabulary.
    """
    prompt, answer = (_integers(columns, each, vocab_size) for each in ("prompt_ids", name))
    for column, ids in (("prompt_ids", prompt), (name, answer)):
        if not ids:
            raise DataError(f"column {column!r} must hold a token or more: got []")
    token_ids = np.array([*prompt, *answer], dtype=np.int32)
    return SupervisedRow(token_ids, np.arange(len(token_ids)) >= len(prompt), shown)


def shown_by_ids(
    row: Row, config: MediaOptions, reader: RowMediaReader | None, what: str
) -> ShownMedia | None:
    """Return the media of `prompt_ids`; see `RowMediaReader.of_ids`."""
    if reader is None:
        return None
    return reader.of_ids(row, config, _integers(row.columns, "prompt_ids", None), what)


def text_of(columns: Mapping[str, object], name: str) -> str:
    """Return the text of a column, empty only if it is a prompt.

    Raises:
        DataError: The column holds something else.
    """
    text = columns.get(name)
    if not isinstance(text, str) or (not text and name != "prompt"):
        raise DataError(f"column {name!r} must hold a text: got {str(text)[:80]!r}")
    return text


def finite_number(columns: Mapping[str, object], name: str) -> float:
    """Return the number of a column.

    Raises:
        DataError: The value is no number, or not finite.
    """
    value = columns[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(float(str(value)))):
        raise DataError(f"column {name!r} must hold a finite number: got {value!r}")
    return float(str(value))


def _integers(columns: Mapping[str, object], name: str, bound: int | None) -> list[int]:
    """Return the numbers of a column, from 0 and below the bound."""
    values = columns[name]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DataError(f"column {name!r} must hold a list of numbers: got {str(values)[:80]!r}")
    limit = 2**31 if bound is None else bound
    wrong = next((value for value in values if not 0 <= value < limit), None)
    if wrong is not None:
        raise DataError(f"column {name!r}: got {wrong}, expected numbers from 0 to {limit - 1}")
    return values


def _flags(values: object) -> list[int]:
    """Return the column `is_trained`: 0 and 1, or false and true."""
    if isinstance(values, list):
        values = [int(value) if isinstance(value, bool) else value for value in values]
    return _integers({"is_trained": values}, "is_trained", 2)


def matched_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], pattern: str
) -> NDArray[np.bool_]:
    """Return [tokens] whether a token holds a character of a match, or of its first group.

    Args:
        tokenizer: Fast tokenizer.
        token_ids: Ids of a row, whose text has the special tokens.
        pattern: Regular expression of Python.

    Raises:
        DataError: The text of the ids has other ids, or the tokenizer does not know their places.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "train_on_regex needs a fast tokenizer, which knows the place of each token: got "
            f"{type(tokenizer).__name__}; leave it out"
        )
    text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] != list(token_ids):
        raise DataError(
            "train_on_regex looks for matches in the text of a row, and the text of these tokens "
            f"has other tokens: {text[:80]!r}; leave it out"
        )
    starts, stops = np.array(encoded["offset_mapping"]).T
    is_matched = np.zeros(len(token_ids), dtype=np.bool_)
    for match in re.finditer(pattern, text):
        first, last = match.span(1 if match.re.groups else 0)
        is_matched |= (stops > first) & (starts < last)
    return is_matched
