"""A histogram as a PNG image, made without a plotting library."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_BARS = 40
PLOT_WIDTH, PLOT_HEIGHT = 600, 300
MARGIN = 50
BAR_COLOUR = (68, 114, 168)
INK = (60, 60, 60)
PIXELS_PER_DOT = 2
# Five rows of three dots, a row as an octal digit: 7 is three dots, 5 the outer two.
GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71111", "8": "75757", "9": "75717", ".": "00002", "-": "00700",
    "A": "75755", "E": "74747", "M": "57755", "N": "75555", "P": "75744", "S": "74717",
    "T": "72222", "X": "55255", "I": "72227", " ": "00000",
}  # fmt: skip


def histogram_png(lengths: Sequence[int], *, step: int) -> bytes:
    """A histogram with at most 40 bars; its axes bear the smallest, largest and tallest number.

    Args:
        lengths: At least one number.
        step: Written above the bars, with the mean.

    Returns:
        The contents of a PNG file, 8-bit RGB.
    """
    counts, edges = np.histogram(np.asarray(lengths), bins=min(MAX_BARS, len(set(lengths))))
    shape = (PLOT_HEIGHT + 2 * MARGIN, PLOT_WIDTH + 2 * MARGIN, 3)
    picture = np.full(shape, 255, dtype=np.uint8)
    bottom, right = MARGIN + PLOT_HEIGHT, MARGIN + PLOT_WIDTH
    borders = np.linspace(MARGIN, right, len(counts) + 1).round().astype(int)
    for i, count in enumerate(counts):
        height = round(PLOT_HEIGHT * int(count) / int(counts.max()))
        picture[bottom - height : bottom, borders[i] : borders[i + 1] - 1] = BAR_COLOUR
    picture[bottom, MARGIN:right] = INK
    title = f"STEP {step}  MEAN {np.mean(lengths):.1f}  MIN {min(lengths)}  MAX {max(lengths)}"
    _write(picture, title, MARGIN // 3, MARGIN)
    _write(picture, str(int(counts.max())), MARGIN, 2)
    _write(picture, f"{edges[0]:.0f}", bottom + 8, MARGIN)
    _write(picture, f"{edges[-1]:.0f}", bottom + 8, right - 8 * PIXELS_PER_DOT)
    return _encode(picture)


def _write(picture: NDArray[np.uint8], text: str, top: int, left: int) -> None:
    """Draw a line of text, each glyph 3 by 5 dots; what lies outside the picture is cut."""
    for position, character in enumerate(text):
        rows = [[int(row, 8) >> bit & 1 for bit in (2, 1, 0)] for row in GLYPHS[character]]
        dots = np.kron(np.array(rows), np.ones((PIXELS_PER_DOT, PIXELS_PER_DOT))).astype(bool)
        start = left + 4 * PIXELS_PER_DOT * position
        area = picture[top : top + dots.shape[0], start : start + dots.shape[1]]
        area[dots[: area.shape[0], : area.shape[1]]] = INK


def _encode(picture: NDArray[np.uint8]) -> bytes:
    """PNG of [height, width, 3]. Source: W3C, Portable Network Graphics, third edition."""
    height, width, _ = picture.shape
    # Every scanline begins with its filter, 0: none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
