"""Containers of films and sounds, recognised by their first bytes, each opened by one demuxer.

FFmpeg's detection also accepts playlists, session descriptions and scripts as films, and opens the
sockets and files that they name.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightrft.engines.media.files import MediaError
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from av.container import InputContainer

# First bytes of files by the name of FFmpeg's demuxer.
BEGINNINGS = {
    "mov": rb".{4}(?:[fs]typ|sidx|moov|mdat|wide|free|skip|uuid|pnot)",
    "matroska": rb"\x1a\x45\xdf\xa3",
    "avi": rb"RIFF.{4}AVI",
    "mpeg": rb"\0\0\x01\xba",
    "mpegvideo": rb"\0\0\x01\xb3",
    "asf": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    "flv": rb"FLV\x01",
    "wav": rb"(?:RIFF|RIFX|RF64|BW64).{4}WAVE",
    "flac": rb"fLaC",
    "ogg": rb"OggS",
    "aiff": rb"FORM.{4}AIF[FC]",
    "au": rb"\.snd",
    "w64": rb"riff\x2e\x91\xcf\x11",
    "caf": rb"caff",
    "amr": rb"#!AMR",
    "wv": rb"wvpk",
    # Some begin with silence outside of any frame.
    "aac": rb"\0*+\xff[\xf0\xf1\xf8\xf9]",
    "mp3": rb"\0*+\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]",
    # Packets are followed by a checksum (broadcasts) or preceded by their time (cameras).
    "mpegts": rb"G.{187}G|G.{203}G|.{4}G.{191}G.{191}G",
}
FILMS = ("mov", "matroska", "avi", "mpeg", "mpegvideo", "mpegts", "asf", "flv")
_BEGINNING = re.compile(
    b"|".join(b"(?P<%s>%s)" % (name.encode(), first) for name, first in BEGINNINGS.items()),
    re.DOTALL,
)
_TAG_BYTES, _HAS_FOOTER = 10, 0x10


def demuxer_of(content: bytes) -> str | None:
    """Return the name of FFmpeg's demuxer for a film or a sound; None for other contents."""
    start = 0
    while content.startswith(b"ID3", start) and len(content) >= start + _TAG_BYTES:
        size = 0
        for byte in content[start + 6 : start + _TAG_BYTES]:
            size = size << 7 | byte & 0x7F
        has_footer = content[start + 5] & _HAS_FOOTER
        start += _TAG_BYTES + size + (_TAG_BYTES if has_footer else 0)
    beginning = _BEGINNING.match(content, start)
    if beginning is None:
        # Behind its tag an MP3 may have a gap.
        return "mp3" if start else None
    return beginning.lastgroup


@contextmanager
def opened_container(
    content: bytes, name: str, what: str, extra: str
) -> "Iterator[InputContainer]":
    """Open a film or a sound without access to anything outside its bytes.

    Args:
        content: Bytes of the file.
        name: Name for messages.
        what: Kind, "film" or "sound".
        extra: Advice for when PyAV is missing.

    Raises:
        MediaError: The file is of another kind, empty or damaged, here or within the context, or
            PyAV is missing.
    """
    try:
        import av
    except ImportError as err:
        raise MediaError(f"{name} is a {what}, which needs PyAV: {extra}") from err
    if not content:
        raise MediaError(f"{name} is an empty file: replace or leave it out")
    demuxer = demuxer_of(content)
    if demuxer is None:
        raise MediaError(
            f"{name} is a damaged {what}, or none: its first bytes are those of no known format "
            f"({', '.join(BEGINNINGS)}); replace or leave it out"
        )
    try:
        with av.open(
            io.BytesIO(content),
            "r",
            format=demuxer,
            options={"protocol_whitelist": ""},
            metadata_errors="replace",
        ) as container:
            yield container
    except MediaError:
        raise
    except Exception as err:  # a demuxer or decoder raises anything
        reason = err.strerror if isinstance(err, av.error.FFmpegError) else first_line(err)
        raise MediaError(
            f"{name} is a damaged {what}, or none: {reason}; replace or leave it out"
        ) from err
