"""Pieces of a chat template as token ids, with texts and images from outside among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightrft.engines.media.media import Encoder, LaterImages, Media
from lightrft.engines.media.sources import ImageSource


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages as token ids.

    Args:
        token_ids: Of them.
        text_spans: [start, stop) of those that are text from outside and were encoded apart.
        later: Images in them; they start at places of `token_ids`.
    """

    token_ids: tuple[int, ...]
    text_spans: tuple[tuple[int, int], ...] = ()
    later: tuple[LaterImages, ...] = ()


class EncodeText(Protocol):
    """Ids of a text; with `split_special_tokens` nothing in it becomes a special token."""

    def __call__(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Return those of one text."""
        ...


@dataclass(frozen=True, slots=True)
class PieceIds:
    """Token ids of a chat template's pieces.

    Args:
        ids: Of texts.
        encoder: Reads the pieces that have places of images.
        end: Id that ends an assistant turn; None where the next turn's first token does.
        end_text: Its name; "" where there is none.
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
            texts: Between them.
            images: In the order of their places in the pieces.
        """
        return self._joined(frame, texts, images, [], "", None)

    def after(
        self,
        turn: Sequence[int],
        frame: Sequence[str],
        texts: Sequence[str],
        images: Sequence[ImageSource],
    ) -> Rendered:
        """Return what follows a sampled turn: its missing end, and the pieces behind that.

        Args:
            turn: Sampled ids.
            frame, texts, images: See `whole`.
        """
        last = next(reversed(turn), None)
        begin = [] if self.end is None or self.end == last else [self.end]
        # Without an end of turns, the stop token that was sampled is the next turn's first.
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
        """Return the ids behind `found`; a first token that is `first` is there already."""
        left, spans, later = list(images), list[tuple[int, int]](), list[LaterImages]()
        for index, piece in enumerate(frame):
            if index:
                start, anchor, first = len(found), self.end_text, None
                found += self.ids(texts[index - 1], split_special_tokens=True)
                spans.append((start, len(found)))
            own = tuple(left[: self.encoder.num_places(piece)])
            del left[: len(own)]
            # Some tokenizers put a space before the first word of a text, but not after the anchor.
            whole = anchor + piece
            media = Media({"image": own})
            ids = [*self.encoder.kept(whole, media).token_ids] if own else self.ids(whole)
            skipped = int(bool(anchor)) + (first is not None and ids[:1] == [first])
            if own:
                later.append(LaterImages(len(found), skipped, whole, own))
            found += ids[skipped:]
        return Rendered(tuple(found), tuple(spans), tuple(later))
