"""Items to train on: rows, groups of rows that are compared, and the media of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightrft.datasets.media import OTHER_BYTES, MediaRow, VisionPrompts, media_row
from lightrft.datasets.types import DataError
from lightrft.engines.media.media import NO_MEDIA, Media, MediumKind, PromptTokens, RowMedia
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightrft.config import MediaOptions
    from lightrft.datasets.files import Row
    from lightrft.datasets.media import Content, Modality
    from lightrft.engines.media.text_encoder import Encoder


@dataclass(frozen=True, slots=True)
class ShownMedia:
    """Media of a row.

    Args:
        text: Text at the beginning of the row, with one placeholder for each medium.
        media: Media in the order of their placeholders.
        kinds: Kinds of media that the model distinguishes.
    """

    text: str
    media: Media
    kinds: frozenset[MediumKind] = frozenset()


_CONTEXT = 8
NOTHING_SHOWN = ShownMedia("", Media())


class RowMediaReader:
    """Reader of the media of rows, for a model that takes them or refuses them.

    Args:
        modality: Modality of the model.
        marks: Tokens that stand for media, which are never trained.
    """

    def __init__(self, modality: Modality, marks: Iterable[int] = ()) -> None:
        self.modality, self.marks = modality, frozenset(marks)
        self._last: tuple[ShownMedia, PromptTokens] | None = None
        self.prompts = modality if isinstance(modality, VisionPrompts) else None

    @property
    def encoder(self) -> Encoder:
        """Encoder of the model."""
        return self.modality.encoder

    def read(self, row: Row, content: Content, config: MediaOptions) -> MediaRow:
        """Return a text or a conversation of a row with its media; see `media_row`."""
        return media_row(row, content, config, self.encoder)

    def refuse(self, row: Row, config: MediaOptions, what: str) -> None:
        """Raise a DataError if a row of a kind without text before its answer has media."""
        if self.read(row, "", config).media:
            raise DataError(f"{row.location}: {what} have no images: give texts or messages")

    def of_ids(
        self, row: Row, config: MediaOptions, token_ids: Sequence[int], what: str
    ) -> ShownMedia | None:
        """Return the images of a row of token ids, named by its text before the answer; or None.

        Args:
            row: Row with `prompt_text` if it has media, and `images_sha256` if their bytes are
                known.
            config: See `read`.
            token_ids: Ids that begin with those of `prompt_text`, a token for each feature.
            what: Name of such rows, for errors.

        Raises:
            DataError: The text is missing, a file has other bytes, or text and images yield other
                tokens.
        """
        text = row.columns.get("prompt_text")
        read = self.read(row, text if isinstance(text, str) else "", config)
        if not read.media:
            return None
        if self.prompts is None or not isinstance(text, str) or not text:
            raise DataError(
                f"{row.location}: {what} have images only beside a column prompt_text, as lightrft "
                "rows writes it: give texts or messages"
            )
        known = row.columns.get("images_sha256")
        if known is not None and known != [medium.digest for medium in read.media]:
            raise DataError(f"{row.location}: {OTHER_BYTES}")
        encoded = self.prompts.tokens(text, read.media, row.location)
        if tuple(token_ids[: len(encoded.token_ids)]) != encoded.token_ids:
            raise DataError(
                f"{row.location}: prompt_text and images give other tokens than the row has: take "
                "the processor, and options such as max_pixels, of the run"
            )
        return ShownMedia(text, read.media, encoded.kinds)

    def without_marks(
        self, token_ids: Sequence[int], is_trained: NDArray[np.bool_], *, is_answer: bool
    ) -> NDArray[np.bool_]:
        """Return the trained tokens without those that stand for media.

        Args:
            token_ids, is_trained: [tokens].
            is_answer: Whether a trained mark is an error: no policy samples it.

        Raises:
            DataError: An answer has such a token.
        """
        is_mark = np.isin(np.asarray(token_ids), list(self.marks))
        if is_answer and (is_mark & is_trained).any():
            raise DataError(
                "an answer has the mark of an image or video, which a model never samples: put "
                "media into prompts"
            )
        return is_trained & ~is_mark

    def expand(
        self,
        token_ids: Sequence[int],
        is_trained: NDArray[np.bool_],
        given: ShownMedia,
        location: str,
    ) -> tuple[tuple[int, ...], NDArray[np.bool_], ShownMedia]:
        """Return a row with a token for each feature of its media, and its media.

        Args:
            token_ids: Ids with one mark for each medium.
            is_trained: [tokens].
            given: Media of the row.
            location: Place of the row, for messages.

        Raises:
            DataError: Text and media do not agree, or processor and tokenizer disagree on the
                tokens around them.
        """
        if self.prompts is None:
            raise DataError("the model reads text only: leave the media out with --text_only")
        # The answers of a pair share one prompt.
        if self._last is None or self._last[0] != given:
            self._last = given, self.prompts.tokens(given.text, given.media, location)
        encoded = self._last[1]
        start = len(encoded.request_token_ids)
        if tuple(token_ids[:start]) != encoded.request_token_ids:
            raise DataError(
                "the text in front of the answer has other tokens alone than with the answer "
                "behind it: give messages, or end the prompt where a token ends"
            )
        before = spread(encoded, is_trained[:start], self.marks)
        whole = np.concatenate([before, is_trained[start:]])
        shown = replace(given, kinds=encoded.kinds)
        return (*encoded.token_ids, *token_ids[start:]), whole, shown


def spread(
    encoded: PromptTokens, is_trained: NDArray[np.bool_], marks: frozenset[int]
) -> NDArray[np.bool_]:
    """Return the trained tokens of a text, where each feature of its media has a token.

    Each run of trained tokens, with some tokens before it, is searched behind the previous run. A
    medium stands between two runs in both texts or in neither. The text behind the last medium
    ends both.

    Args:
        encoded: Text with one mark for each medium, and with all its features.
        is_trained: [tokens] of the text with marks.
        marks: Tokens that stand for media.

    Raises:
        DataError: A run is missing: the processor changes the text around media.
    """
    short, long = encoded.request_token_ids, encoded.token_ids
    is_mark, is_feature = ([token in marks for token in ids] for ids in (short, long))
    result = np.zeros(len(long), dtype=np.bool_)
    tail = is_mark[::-1].index(True) if any(is_mark) else len(short)
    if tail and long[-tail:] != short[-tail:]:
        raise DataError("the processor changes the text behind the last image or video")
    known, place, rest = 0, 0, len(long) - tail
    for start, stop in _runs(is_trained[: len(short) - tail]):
        # Tokens before the run, up to a medium, distinguish it from other runs.
        first = start
        while first > max(known, start - _CONTEXT) and not is_mark[first - 1]:
            first -= 1
        wanted, has_medium = short[first:stop], any(is_mark[known:start])
        fits = (
            at
            for at in range(place, rest - len(wanted) + 1)
            if long[at : at + len(wanted)] == wanted and any(is_feature[place:at]) == has_medium
        )
        at = next(fits, -1)
        known, place = stop, at + len(wanted)
        result[place - (stop - start) : place] = True
        if at < 0 or any(is_mark[stop:]) != any(is_feature[place:rest]):
            raise DataError(
                "the processor writes the tokens around an image or video otherwise than the chat "
                "template: train the last turn alone (--train_on last_assistant)"
            )
    result[rest:] |= is_trained[len(short) - tail :]
    return result


def _runs(is_trained: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the beginning and end of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_trained, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class RowWithMedia(Protocol):
    """Part of a row that this module reads."""

    @property
    def shown(self) -> ShownMedia | None:
        """Media of the row."""
        ...


@dataclass(frozen=True, slots=True)
class RowPixels:
    """Encoder of the rows of a run, and the kinds of media that some of them have.

    Every rank knows all rows, so ranks agree on the kinds without communication.
    """

    encoder: Encoder = TEXT_ENCODER
    present: frozenset[MediumKind] = frozenset()

    @classmethod
    def of(cls, encoder: Encoder, rows: Iterable[RowWithMedia]) -> Self:
        """Collect the kinds of all trained and held-out rows."""
        shown = (row.shown for row in rows)
        return cls(encoder, frozenset(kind for each in shown if each for kind in each.kinds))

    def read(self, rows: Sequence[RowWithMedia]) -> RowMedia:
        """Return the media of a forward pass; rows with one prompt share its tensors."""
        if not self.present:
            return NO_MEDIA
        shown = [(row.shown.text, row.shown.media) for row in rows if row.shown is not None]
        encoded = iter(self.encoder.kept_all(shown))
        prompts = [None if row.shown is None else next(encoded) for row in rows]
        # The next pass has other rows, and the pixels of all would not fit into memory.
        self.encoder.forget()
        return RowMedia(tuple(prompts), self.encoder.blanks(self.present))


TEXT_ALONE = RowPixels()


class RowGroup(Protocol):
    """Rows, at least one, whose losses are computed together."""

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """All rows, in the order in which they are compared."""
        ...


Item = TypeVar("Item", bound=RowGroup)
_Item_co = TypeVar("_Item_co", bound=RowGroup, covariant=True)


class RowData(Dataset[int], Generic[_Item_co]):
    """Items in the order of their files; the data set yields their places.

    Args:
        rows: Items of one kind.
        summary: One line about the kept and dropped data.
        encoder: Encoder of their images and videos.
        weights: How often each item is drawn, see `weight_of`; () is equally often.
    """

    def __init__(
        self,
        rows: Sequence[_Item_co],
        summary: str,
        *,
        encoder: Encoder = TEXT_ENCODER,
        weights: Sequence[float] = (),
    ) -> None:
        self.rows, self.summary, self.encoder = tuple(rows), summary, encoder
        self.weights = tuple(weights)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def is_paired(self) -> bool:
        """Return whether the rows of an item are compared with each other."""
        return len(self.rows[0].rows) > 1


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """Row to train on.

    Args:
        token_ids: [tokens] int32.
        is_trained: [tokens] bool; never the first token, which nothing predicts.
        shown: Images and videos; None without.
        teacher: Name of its teacher; "" if there is only one, or none.
        remarks: Parts of its text that were read differently than written.
        prompt: Hash of the text before the first trained token; b"" for a row of ids.
    """

    token_ids: NDArray[np.int32]
    is_trained: NDArray[np.bool_]
    shown: ShownMedia | None = None
    teacher: str = ""
    remarks: tuple[str, ...] = ()
    prompt: bytes = b""

    @property
    def rows(self) -> tuple[SupervisedRow, ...]:
        """The row alone: its loss needs no other."""
        return (self,)

    @property
    def media_digests(self) -> tuple[bytes, ...]:
        """Hash of each of its images and videos."""
        media = () if self.shown is None else self.shown.media
        return tuple(medium.digest.encode() for medium in media)

    @property
    def key(self) -> tuple[bytes, ...]:
        """Key that distinguishes it from other rows: its tokens, images and videos."""
        return self.token_ids.tobytes(), *self.media_digests

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[tokens] before the first trained one, which may hold the end of a text before it."""
        return self.token_ids[: int(self.is_trained.argmax())]

    @property
    def prompt_key(self) -> tuple[bytes, ...]:
        """Key of its prompt, whatever follows: text or ids, images and videos."""
        return self.prompt or self.prompt_ids.tobytes(), *self.media_digests

    @property
    def num_trained(self) -> int:
        """Number of tokens whose loss counts."""
        return int(self.is_trained.sum())


def dropped(too_long: Sequence[str]) -> str:
    """Return how many rows are over-long, and the places of the first; "" without any."""
    examples = ", ".join(too_long[:3])
    return f"dropped {len(too_long)} over-long (first: {examples})" if too_long else ""
