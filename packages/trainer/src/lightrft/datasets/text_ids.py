"""Texts as token ids: one beginning, no end behind a prompt, one end behind trained text."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.datasets.types import DataError
from lightrft.engines.text import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Every tokenizer knows some of these characters.
_PROBE = string.ascii_letters + string.digits + string.punctuation
_BEGUN = "hold their beginning, which is not written a second time"
_ENDED = "hold their end, and what stands behind it is left out"
_LEFT_OPEN = "the tokenizer ends a text by a token of its own, and prompts are left without it"
# Number of characters that hold the beginning of a text.
_HEAD = 64


def frame_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer adds before and behind a text.

    Raises:
        DataError: It encodes the text between them differently than alone.
    """
    bare, framed = (
        tokenizer([_PROBE], add_special_tokens=adds)["input_ids"][0] for adds in (False, True)
    )
    size = len(bare)
    for start in range(len(framed) - size + 1):
        if framed[start : start + size] == bare:
            return list(framed[:start]), list(framed[start + size :])
    raise DataError(
        f"the tokenizer encodes {_PROBE!r} otherwise where it adds special tokens ({framed}) than "
        f"alone ({bare}): what it writes around a text is not known; give another tokenizer"
    )


def prompt_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of prompts without a chat template: begun once, and with an open end."""
    before, _ = frame_ids(tokenizer)
    return [_begun(ids, before) for ids in _bare_ids(tokenizer, texts)]


def prompt_remark(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """Return a remark on prompts that are read differently than encoded by default, or ""."""
    before, after = frame_ids(tokenizer)
    heads = _bare_ids(tokenizer, [text[:_HEAD] for text in texts]) if before else []
    begun = counted(_BEGUN for ids in heads if _begun(ids, before) is ids)
    return "; ".join(filter(None, (begun, _LEFT_OPEN if after else "")))


def _bare_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Sequence[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def _begun(ids: list[int], before: Sequence[int]) -> list[int]:
    return ids if ids[: len(before)] == before else [*before, *ids]


@dataclass(frozen=True, slots=True)
class WholeText:
    """Trained text as token ids.

    Args:
        token_ids: Ids from its beginning to its end.
        stops: Place in the text behind each token; empty without a fast tokenizer.
        remarks: Parts that were read differently than written.
    """

    token_ids: list[int]
    stops: list[float]
    remarks: tuple[str, ...]


class TextIds:
    """Encoder of whole texts without a chat template.

    A text has one beginning, the tokenizer's, and one end: the one it has, if only spaces follow,
    or the tokenizer's.

    Args:
        tokenizer: Tokenizer of the model.
        end_of_turn: Id that ends a turn of its chat template; None without.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_of_turn: int | None) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = frame_ids(tokenizer)
        ends = [tokenizer.eos_token_id, end_of_turn, *self._after[-1:]]
        self._ends = [each for each in ends if each is not None]
        self._names = tuple(map(str, tokenizer.convert_ids_to_tokens(self._ends)))

    def __call__(self, text: str, *, has_media: bool = False) -> WholeText:
        """Return token ids of a trained text.

        Args:
            text: Whole text.
            has_media: Whether a processor reads it, which adds nothing before a text.
        """
        bare_text, end = text.rstrip(), self._tokenizer.eos_token_id
        is_ended = bool(self._names) and bare_text.endswith(self._names)
        encoded = self._tokenizer(
            bare_text if is_ended else text,
            add_special_tokens=False,
            return_offsets_mapping=self._tokenizer.is_fast,
        )
        bare: list[int] = encoded["input_ids"]
        before = [] if has_media else self._before
        ids = _begun(bare, before)
        is_begun = bool(before) and ids is bare
        stops: list[float] = [0.0] * (len(ids) - len(bare))
        stops += [stop for _, stop in encoded.get("offset_mapping", ())]
        for added in (self._after, [] if end is None else [end]):
            if ids and ids[-1] not in self._ends:
                ids = [*ids, *added]
        stops += [float("inf")] * (len(ids) - len(stops))
        odd = {_BEGUN: is_begun, _ENDED: is_ended and bare_text != text}
        return WholeText(ids, stops, tuple(what for what, holds in odd.items() if holds))


def counted(remarks: Iterable[str]) -> str:
    """Return the number of texts for each remark, in one line; "" without any."""
    return "; ".join(f"{count} texts {what}" for what, count in Counter(remarks).items())
