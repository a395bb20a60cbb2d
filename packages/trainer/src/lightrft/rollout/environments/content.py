"""Answers with images: blocks as authors write them, JSON between processes, parts for the model.

Digests name images wherever an answer is shown, compared or recorded.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    # Workers import it, and NumPy with it, only if an answer has an image.
    from lightrft.engines.media.sources import ImageSource

Parts: TypeAlias = "tuple[str | ImageSource, ...]"
# Digits of an image's SHA-256 in answers.
_DIGEST_LETTERS = 16
_IMAGE_KINDS = ("image", "image_url")


class ContentError(ValueError):
    """An answer has content that cannot be shown to a model; the message says which."""


def has_image(result: object) -> bool:
    """Return whether a result is an image, or a list of blocks with one."""
    return any(map(_is_image, _blocks(result)))


def as_parts(result: object) -> Parts:
    """Return the texts and images of blocks, in order.

    Raises:
        ContentError: A block is neither text nor a readable image.
    """
    from lightrft.engines.media.files import MediaError
    from lightrft.engines.media.sources import as_image

    parts: list[str | ImageSource] = []
    for number, block in enumerate(_blocks(result), start=1):
        if isinstance(block, str):
            parts.append(block)
        elif _is_image(block):
            try:
                image = as_image(block, name=f"image in block {number}", folder=Path())
                image.decode()  # here, a damaged image fails only its episode
            except MediaError as error:
                raise ContentError(str(error)) from error
            parts.append(image)
        elif isinstance(block, Mapping) and isinstance(block.get("text"), str):
            parts.append(str(block["text"]))
        else:
            type_name = type(block).__name__
            kind = block.get("type", type_name) if isinstance(block, Mapping) else type_name
            raise ContentError(f"block {number} must be text or an image: got {str(kind)[:80]!r}")
    return tuple(parts)


def named(parts: Parts) -> str:
    """Return an answer as text, in which digests stand for images."""
    return "".join(
        part if isinstance(part, str) else f"[image {part.digest[:_DIGEST_LETTERS]}]"
        for part in parts
    )


def to_json(parts: Parts) -> list[object]:
    """Convert parts to JSON, to cross the pipe."""
    return [
        part if isinstance(part, str) else [base64.b64encode(part.read()).decode()]
        for part in parts
    ]


def from_json(listed: object, name: str) -> Parts:
    """Convert JSON that crossed the pipe to parts; `name` identifies the answer."""
    from lightrft.engines.media.sources import ImageSource

    return tuple(
        item
        if isinstance(item, str)
        else ImageSource(name, content=base64.b64decode(cast("list[str]", item)[0]))
        for item in cast("Sequence[object]", listed or ())
    )


def _blocks(result: object) -> Sequence[object]:
    return result if isinstance(result, list | tuple) else [result]


def _is_image(block: object) -> bool:
    if isinstance(block, Mapping):
        return block.get("type") in _IMAGE_KINDS
    return callable(getattr(block, "save", None)) and hasattr(block, "size")
