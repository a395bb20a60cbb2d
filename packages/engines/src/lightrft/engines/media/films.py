"""Frames of videos: which of them are taken, at which size, and how films are decoded."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from lightrft.engines.media.containers import FILMS, demuxer_of, opened_container
from lightrft.engines.media.media import MediaError
from lightrft.engines.media.pictures import MAX_PIXELS

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream
    from numpy.typing import NDArray
    from PIL.Image import Image

# Of the frames of a film, where no option says otherwise: what the processors of Qwen take.
FILM_FPS = 2.0
MAX_FILM_FRAMES = 768
# All frames of a video together: 1.5 GB once they are decoded.
MAX_VIDEO_PIXELS = 500_000_000
_SUFFIXES = (".mp4", ".mkv", ".avi", ".webm", ".mov", ".m4v", ".mpg", ".mpeg")
_STILLS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"jp2 ")
# A film whose last frame lies that far before the end that its header names is cut off.
_MISSING_SECONDS, _MISSING_SHARE = 0.5, 0.05
# Seconds by which the time of a frame may lie behind its true one: Matroska and Flash count whole
# milliseconds, from a first frame that is rounded as well.
_ROUNDING = 0.001 + 1e-6


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Choice of frames of a video, and bounds of their size.

    Args:
        fps: Frames a second; None takes `FILM_FPS` of a film, and all of what is given as frames.
        max_frames: Most frames, spread evenly; None takes `MAX_FILM_FRAMES` of a film.
        max_pixels, min_pixels: Of a frame, which is scaled to them; None leaves it as it is.
        multiple: Of which the sides of a scaled frame are multiples.
        min_frames: Fewest frames; those of a shorter video are taken closer to each other.
    """

    fps: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    min_pixels: int | None = None
    multiple: int = 1
    min_frames: int = 1

    def times(self, seconds: float, own_fps: float, *, is_film: bool) -> tuple[int, float]:
        """Number of frames and how many of them lie in a second: frame k is that of k / rate.

        Args:
            seconds: Length of the video.
            own_fps: Of the video, which is never exceeded.
            is_film: Whether the defaults are those of films.
        """
        wanted = self.fps or (FILM_FPS if is_film else own_fps)
        rate = min(wanted, own_fps)
        count = max(1, math.ceil(round(seconds * rate, 6)))
        most = self.max_frames or (MAX_FILM_FRAMES if is_film else count)
        kept = max(min(count, most), self.min_frames)
        return kept, rate if kept == count else kept / seconds

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a frame once it is scaled: within the bounds where sides allow it."""
        pixels = width * height
        low, high = self.min_pixels or 0, self.max_pixels or pixels
        if low <= pixels <= high:
            return width, height
        scale = math.sqrt((high if pixels > high else low) / pixels)
        to_whole = math.floor if scale < 1 else math.ceil
        sides = (to_whole(side * scale / self.multiple) for side in (width, height))
        wide, high = (max(1, side) * self.multiple for side in sides)
        return wide, high

    def of_frames(self, frames: "Sequence[Image]", fps: float) -> "tuple[list[Image], float]":
        """The frames that are taken of those of one rate, scaled, and their rate."""
        count, rate = self.times(len(frames) / fps, fps, is_film=False)
        places = [min(int(i * fps / rate + 1e-6), len(frames) - 1) for i in range(count)]
        found = [frames[place] for place in places]
        size = self.size(*found[0].size)
        if size == found[0].size:
            return found, rate
        from PIL import Image

        return [frame.resize(size, Image.Resampling.BICUBIC) for frame in found], rate


ALL_FRAMES = FrameRules()


def is_film(name: str, content: bytes) -> bool:
    """Whether a file is a film by its first bytes or its name, and no picture."""
    if content[4:8] == b"ftyp" and content[8:12] in _STILLS:
        return False
    return demuxer_of(content) in FILMS or name.lower().endswith(_SUFFIXES)


def film_type(content: bytes) -> str:
    """The media type of a film."""
    demuxer = demuxer_of(content)
    if demuxer == "matroska":
        return "video/webm" if b"webm" in content[:64] else "video/x-matroska"
    return "video/x-msvideo" if demuxer == "avi" else "video/mp4"


@dataclass(frozen=True, slots=True)
class _FilmFacts:
    """A film's length in seconds, time of its first frame, rate and size."""

    seconds: float
    start: float
    fps: float
    width: int
    height: int


def film_size(content: bytes, name: str) -> tuple[int, int]:
    """Width and height of a film's frames as they are stored, from its header.

    Raises:
        MediaError: It is no film, or damaged.
    """
    with _opened(content, name) as (_, stream):
        return stream.codec_context.width, stream.codec_context.height


def read_film(
    content: bytes, name: str, rules: FrameRules = ALL_FRAMES
) -> "tuple[NDArray[np.uint8], float]":
    """The frames of a film that are taken, upright, and how many of them lie in a second.

    Frame k is what the film shows at k / rate seconds, whatever the times of its own frames.

    Args:
        content: The file.
        name: For messages.
        rules: Which frames are taken.

    Returns:
        [frames, height, width, 3].

    Raises:
        MediaError: It is no film, empty, sound alone, damaged, cut off or too large, or PyAV is
            missing.
    """
    with _opened(content, name) as (container, stream):
        facts = _facts(container, stream, name)
        count, rate = rules.times(facts.seconds, facts.fps, is_film=True)
        size = rules.size(facts.width, facts.height)
        total = count * size[0] * size[1]
        if total > MAX_VIDEO_PIXELS:
            raise MediaError(
                f"{name} gives {count} frames of {size[0]} x {size[1]} pixels: expected at most "
                f"{MAX_VIDEO_PIXELS} pixels in all; lower --video_fps, --video_max_frames or "
                "--max_pixels"
            )
    # Packets were read to the end, and not every format can be wound back.
    with _opened(content, name) as (container, stream):
        found = _shown(container.decode(stream), facts, count, rate, name)
        frames = np.stack([_pixels(frame, size) for frame in found])
    return frames, rate


@contextmanager
def _opened(content: bytes, name: str) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """The file and its stream of pictures; errors inside are those of a damaged film."""
    extra = 'pip install \'lightrft[video]\', or store its frames: {"frames": [...], "fps": 2}'
    with opened_container(content, name, "film", extra) as container:
        streams = [s for s in container.streams.video if s.codec_context and not _is_cover(s)]
        if not streams:
            raise MediaError(f"{name} has no pictures, only sound: give films with pictures")
        stream = streams[0]
        if stream.codec_context.width * stream.codec_context.height > MAX_PIXELS:
            raise MediaError(f"{name} has frames of more than {MAX_PIXELS} pixels: scale them")
        yield container, stream


def _is_cover(stream: "VideoStream") -> bool:
    """Whether a stream is the picture on a record."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def _facts(container: "InputContainer", stream: "VideoStream", name: str) -> _FilmFacts:
    """Read from all packets, which need no decoding."""
    times: list[float] = []
    end = 0.0
    for packet in container.demux():
        place = _seconds(packet)
        if place is None:
            continue
        end = max(end, place + float((packet.duration or 0) * (packet.time_base or 0)))
        if packet.stream.index == stream.index:
            times.append(place)
    if not times:
        raise MediaError(f"{name} has no frames: replace or leave it out")
    start, last = min(times), max(times)
    step = (last - start) / (len(times) - 1) if len(times) > 1 else 0.0
    fps = 1 / step if step > 0 else float(stream.average_rate or 1)
    end = max(end, last + 1 / fps)
    declared = (container.duration or 0) / 1_000_000
    if declared - end > max(_MISSING_SECONDS, _MISSING_SHARE * declared):
        raise MediaError(
            f"{name} is cut off: it lasts {declared:.1f} s by its header and has {end:.1f} s; "
            "replace or leave it out"
        )
    context = stream.codec_context
    return _FilmFacts(last - start + 1 / fps, start, fps, context.width, context.height)


def _seconds(packet: "Packet[Stream]") -> float | None:
    if packet.pts is None or packet.time_base is None or not packet.size:
        return None
    return float(packet.pts * Fraction(packet.time_base))


def _shown(
    frames: "Iterable[VideoFrame]", facts: _FilmFacts, count: int, rate: float, name: str
) -> "Iterator[VideoFrame]":
    """Of each time k / rate, the frame that the film shows then; whole and in order."""
    last, place = None, 0
    for frame in frames:
        if frame.is_corrupt:
            raise MediaError(f"{name} is a damaged film: a frame is not whole; replace it")
        time = facts.start if frame.time is None else frame.time
        while place < count and last is not None and time - facts.start > place / rate + _ROUNDING:
            yield last
            place += 1
        if place == count:
            return
        last = frame
    if last is None:
        raise MediaError(f"{name} has no frames that can be decoded: replace or leave it out")
    for _ in range(place, count):
        yield last


def _pixels(frame: "VideoFrame", size: tuple[int, int]) -> "NDArray[np.uint8]":
    """[height, width, 3], turned as the camera was held."""
    pixels = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))
