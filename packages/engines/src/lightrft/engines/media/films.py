"""Choice and size of video frames, and decoding of films."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from lightrft.engines.media.containers import FILMS, demuxer_of, opened_container
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.pictures import MAX_PIXELS

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream
    from numpy.typing import NDArray
    from PIL.Image import Image

# Defaults for films without options, as in the processors of Qwen.
FILM_FPS = 2.0
MAX_FILM_FRAMES = 768
# Limit over all frames of a video: 1.5 GB once decoded.
MAX_VIDEO_PIXELS = 500_000_000
_SUFFIXES = (".mp4", ".mkv", ".avi", ".webm", ".mov", ".m4v", ".mpg", ".mpeg")
_STILLS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"jp2 ")
# A film is cut off if its last frame lies this far before the end named by its header.
_MISSING_SECONDS, _MISSING_SHARE = 0.5, 0.05
# Seconds by which the time of a frame may lie behind the true one: Matroska and Flash round to
# milliseconds, counted from a first frame that is rounded too.
_ROUNDING = 0.001 + 1e-6


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Choice of frames of a video, and bounds of their size.

    Args:
        fps: Frames per second; None takes `FILM_FPS` for films and all frames otherwise.
        max_frames: Most frames, spread evenly; None takes `MAX_FILM_FRAMES` for films.
        max_pixels, min_pixels: Bounds to which a frame is scaled; None for no bound.
        multiple: Divisor of the sides of a scaled frame.
        min_frames: Fewest frames; a shorter video is sampled more densely.
    """

    fps: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    min_pixels: int | None = None
    multiple: int = 1
    min_frames: int = 1

    def times(self, seconds: float, own_fps: float, *, is_film: bool) -> tuple[int, float]:
        """Return the number of frames and their rate: frame k is shown at k / rate seconds.

        Args:
            seconds: Length of the video.
            own_fps: Frame rate of the video, which is never exceeded.
            is_film: Whether the defaults for films apply.
        """
        wanted = self.fps or (FILM_FPS if is_film else own_fps)
        rate = min(wanted, own_fps)
        count = max(1, math.ceil(round(seconds * rate, 6)))
        most = self.max_frames or (MAX_FILM_FRAMES if is_film else count)
        kept = max(min(count, most), self.min_frames)
        return kept, rate if kept == count else kept / seconds

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of a scaled frame, within the bounds where its sides allow it."""
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
        """Select and scale frames of one rate; return them with their new rate."""
        count, rate = self.times(len(frames) / fps, fps, is_film=False)
        places = [min(int(i * fps / rate + 1e-6), len(frames) - 1) for i in range(count)]
        kept = [frames[place] for place in places]
        size = self.size(*kept[0].size)
        if size == kept[0].size:
            return kept, rate
        from PIL import Image

        return [frame.resize(size, Image.Resampling.BICUBIC) for frame in kept], rate


ALL_FRAMES = FrameRules()


def is_film(name: str, content: bytes) -> bool:
    """Return whether a file is a film, not a picture, by its first bytes or its name."""
    if content[4:8] == b"ftyp" and content[8:12] in _STILLS:
        return False
    return demuxer_of(content) in FILMS or name.lower().endswith(_SUFFIXES)


def film_type(content: bytes) -> str:
    """Return the media type of a film."""
    demuxer = demuxer_of(content)
    if demuxer == "matroska":
        return "video/webm" if b"webm" in content[:64] else "video/x-matroska"
    return "video/x-msvideo" if demuxer == "avi" else "video/mp4"


def film_size(content: bytes, name: str) -> tuple[int, int]:
    """Return width and height of a film's frames as stored, from its header.

    Raises:
        MediaError: The file is no film, or damaged.
    """
    with _opened(content, name) as (_, stream):
        return stream.codec_context.width, stream.codec_context.height


def read_film(
    content: bytes, name: str, rules: FrameRules = ALL_FRAMES
) -> "tuple[NDArray[np.uint8], float]":
    """Return selected frames of a film, upright, and their rate per second.

    Frame k is what the film shows at k / rate seconds, whatever the times of its stored frames.

    Args:
        content: Bytes of the file.
        name: Name for messages.
        rules: Choice of frames.

    Returns:
        Frames [frames, height, width, 3] and their rate.

    Raises:
        MediaError: The file is no film, empty, only sound, damaged, cut off or too large, or PyAV
            is missing.
    """
    with _opened(content, name) as (container, stream):
        seconds, begin, fps = _timing(container, stream, name)
        count, rate = rules.times(seconds, fps, is_film=True)
        size = rules.size(stream.codec_context.width, stream.codec_context.height)
        total = count * size[0] * size[1]
        if total > MAX_VIDEO_PIXELS:
            raise MediaError(
                f"{name} gives {count} frames of {size[0]} x {size[1]} pixels: expected at most "
                f"{MAX_VIDEO_PIXELS} pixels in all; lower --video_fps, --video_max_frames or "
                "--max_pixels"
            )
    # Packets were read to the end, and not every format can be rewound.
    with _opened(content, name) as (container, stream):
        shown = _shown(container.decode(stream), begin, count, rate, name)
        frames = np.stack([_pixels(frame, size) for frame in shown])
    return frames, rate


@contextmanager
def _opened(content: bytes, name: str) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """Open a film and its video stream; errors within the context mean a damaged film."""
    extra = 'pip install \'lightrft[video]\', or store its frames: {"frames": [...], "fps": 2}'
    with opened_container(content, name, "film", extra) as container:
        streams = [s for s in container.streams.video if s.codec_context and not _is_cover(s)]
        if not streams:
            raise MediaError(
                f"{name} contains no video stream, only sound: give films with pictures"
            )
        stream = streams[0]
        if stream.codec_context.width * stream.codec_context.height > MAX_PIXELS:
            raise MediaError(f"{name} has frames of more than {MAX_PIXELS} pixels: scale them")
        yield container, stream


def _is_cover(stream: "VideoStream") -> bool:
    """Return whether a stream is a cover picture."""
    from av.stream import Disposition

    return bool(stream.disposition & Disposition.attached_pic)


def _timing(
    container: "InputContainer", stream: "VideoStream", name: str
) -> tuple[float, float, float]:
    """Read a film's seconds, time of its first frame, and rate from all packets, undecoded."""
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
    return last - start + 1 / fps, start, fps


def _seconds(packet: "Packet[Stream]") -> float | None:
    if packet.pts is None or packet.time_base is None or not packet.size:
        return None
    return float(packet.pts * Fraction(packet.time_base))


def _shown(
    frames: "Iterable[VideoFrame]", begin: float, count: int, rate: float, name: str
) -> "Iterator[VideoFrame]":
    """Yield the frame shown at each time k / rate, in order; raise if one is not whole."""
    last, place = None, 0
    for frame in frames:
        if frame.is_corrupt:
            raise MediaError(f"{name} is a damaged film: a frame is not whole; replace it")
        time = begin if frame.time is None else frame.time
        while place < count and last is not None and time - begin > place / rate + _ROUNDING:
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
    """Return the pixels [height, width, 3], rotated upright."""
    pixels = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))
