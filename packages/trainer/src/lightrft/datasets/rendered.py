"""Pieces of a chat template as token ids, with external texts and images among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightrft.engines.media.media import LaterImages, Media
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.media.text_encoder import Encoder


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages as token ids.

    Args:
        token_ids: Ids of the messages.
        text_spans: [start, stop) of external texts, which were encoded separately.
        later: Images in the messages; they start at places of `token_ids`.
    """

    token_ids: tuple[int, ...]
    text_spans: tuple[tuple[int, int], ...] = ()
    later: tuple[LaterImages, ...] = ()


class EncodeText(Protocol):
    """Encoder of a text; with `split_special_tokens` nothing becomes a special token."""

    def __call__(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Return the ids of one text."""
        ...


@dataclass(frozen=True, slots=True)
class PieceIds:
    """Token ids of a chat template's pieces.

    Args:
        ids: Encoder of texts.
        encoder: Encoder of the pieces with places of images.
        end: Id that ends an assistant turn; None if the next turn's first token does.
        end_text: Name of that id; "" if there is none.
    """

    ids: EncodeText
    encoder: Encoder
    end: int | None
    end_text: str

    def whole(
        self, frame: Sequence[str], texts: Sequence[str], images: Sequence[ImageSource]
    ) -> Rendered:
        """Return a conversation from its beginning.

        Args:
            frame: Pieces of the template, one more than texts.
            texts: Texts between the pieces.
            images: Images in the order of their places in the pieces.
        """
        return self._joined(frame, texts, images, [], "", None)

    def after(
        self,
        turn: Sequence[int],
        frame: Sequence[str],
        texts: Sequence[str],
        images: Sequence[ImageSource],
    ) -> Rendered:
        """Return the suffix of a sampled turn: its missing end, and the pieces behind it.

        Args:
            turn: Sampled ids.
            frame, texts, images: See `whole`.
        """
        last = next(reversed(turn), None)
        begin = [] if self.end is None or self.end == last else [self.end]
        # Without an end of turns, the sampled stop token is the next turn's first.
        first = last if self.end is None else None
        return self._joined(frame, texts, images, begin, self.end_text, first)

    def _joined(
        self,
        frame: Sequence[str],
        texts: Sequence[str],
        images: Sequence[ImageSource],
        found: list[int],
        anchor: str,
        first: int | None,
    ) -> Rendered:
        """Append the ids of the pieces to `found`; a first token `first` is there already."""
        left, spans, later = list(images), list[tuple[int, int]](), list[LaterImages]()
        for index, piece in enumerate(frame):
            if index:
                start, anchor, first = len(found), self.end_text, None
                found += self.ids(texts[index - 1], split_special_tokens=True)
                spans.append((start, len(found)))
            shown = tuple(left[: self.encoder.num_places(piece)])
            del left[: len(shown)]
            # Some tokenizers put a space before the first word of a text, but not after the anchor.
            whole = anchor + piece
            media = Media({"image": shown})
            ids = [*self.encoder.kept(whole, media).token_ids] if shown else self.ids(whole)
            skipped = int(bool(anchor)) + (first is not None and ids[:1] == [first])
            if shown:
                later.append(LaterImages(len(found), skipped, whole, shown))
            found += ids[skipped:]
        return Rendered(tuple(found), tuple(spans), tuple(later))
