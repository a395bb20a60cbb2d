"""Small pictures of a row's media, as text that fits into a line of samples.jsonl."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.records.rollout import Rollout

# Longest side in pixels, and how many of a row are kept.
SIDE, MAX_THUMBNAILS = 96, 4
# Of one of them as text: 96 x 96 pixels of noise take 11,600.
MAX_CHARACTERS = 16_000
_FORM = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


def thumbnails(rollout: Rollout) -> list[str]:
    """Data addresses of a row's first images, and of the first frames of its prompt's videos."""
    sources = [*rollout.images, *(video.frames[0] for video in rollout.prompt.media.videos)]
    found = []
    for source in sources[:MAX_THUMBNAILS]:
        picture = source.decode()
        picture.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        found.append(f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return found


def shown_thumbnails(value: object) -> list[str]:
    """Thumbnails of a line that a page may show; whatever else stands there is left out."""
    listed = value if isinstance(value, list) else []
    return [
        text
        for text in listed[:MAX_THUMBNAILS]
        if isinstance(text, str) and len(text) <= MAX_CHARACTERS and _FORM.fullmatch(text)
    ]
