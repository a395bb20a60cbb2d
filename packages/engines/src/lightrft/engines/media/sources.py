"""Images and videos as their original bytes, read on demand."""

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np

from lightrft.engines.media.files import MediaError, facts_of_file, is_list_of_bytes
from lightrft.engines.media.films import (
    ALL_FRAMES,
    MAX_VIDEO_PIXELS,
    FrameRules,
    film_size,
    film_type,
    is_film,
    read_film,
)
from lightrft.engines.media.pictures import (
    MAX_FRAMES,
    animation,
    as_rgb,
    is_whole,
    of_array,
    opened,
    upright_size,
)
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

MAX_BYTES = 256 * 1024 * 1024
# Keys of an object with a medium, in the order in which they are looked up.
_IMAGE_KEYS = ("bytes", "image", "path", "image_url", "url", "base64")
_VIDEO_KEYS = ("frames", "bytes", "video", "path", "video_url", "url")
# Types of pictures by their first bytes.
_MIME = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
    b"II*\0": "image/tiff",
    b"MM\0*": "image/tiff",
}
_BYTES = bytes | bytearray | memoryview
# Frame rates that a video may have.
_FPS_RANGE = (1e-3, 1e4)


@dataclass(frozen=True)
class FileSource:
    """Encoded bytes of a medium, in a file or in memory.

    Args:
        name: Path or place in the data, for messages.
        path: Path of the file; None if `content` has its bytes.
        content: Encoded bytes; None if they are in a file.

    Attributes:
        kind: Kind and forms of the file for messages.
    """

    kind: ClassVar[str]
    name: str
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, value: object, *, name: str, folder: Path) -> Self:
        """Make a file from a path, a `file://` or data address, encoded bytes or base64 text.

        Args:
            value: Path, address, bytes or text.
            name, folder: Place and folder as in `as_image`.

        Raises:
            MediaError: The value is none of these, or an address that would have to be fetched.
        """
        if isinstance(value, _BYTES) or is_list_of_bytes(value):
            return cls(name, content=bytes(cast("bytes", value)))
        if not isinstance(value, str | Path):
            raise MediaError(f"{name}: expected {cls.kind}, got {type(value).__name__}")
        text = str(value)
        if text.startswith(("http://", "https://")):
            raise MediaError(f"{name}: {text[:80]!r} would have to be fetched; store it as a file")
        if text.startswith("data:"):
            return cls(name, content=_unbase64(text.partition(",")[2], name))
        if not text.strip():
            raise MediaError(f"{name} is an empty text: give a path, or leave it out")
        path = folder / text.removeprefix("file://")
        try:
            is_file, is_folder = path.is_file(), path.is_dir()
        except OSError:
            # A name longer than the file system allows.
            is_file = is_folder = False
        if is_file:
            return cls(str(path), path=path)
        # The first 12 bytes identify formats; base64 of an image is longer than any path.
        if len(text) > 1024 or _begins_as_image(text):
            return cls(name, content=_unbase64(text, name))
        what = "is a folder, not a file" if is_folder else "paths are relative to the data file"
        raise MediaError(f"{name}: no file {path}; {what}")

    def read(self) -> bytes:
        """Return the encoded bytes.

        Raises:
            MediaError: The file is missing or larger than `MAX_BYTES`.
        """
        if self.content is not None:
            return self.content
        try:
            with cast("Path", self.path).open("rb") as file:
                # Some files report size 0 and have no end.
                content = file.read(MAX_BYTES + 1)
        except OSError as err:
            raise MediaError(
                f"{self.name} cannot be read: {err.strerror or first_line(err)}; paths are "
                "relative to the data file"
            ) from err
        if len(content) > MAX_BYTES:
            raise MediaError(f"{self.name} has more than {MAX_BYTES} bytes, which is the limit")
        return content

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its bytes: images with the same digest are the same image."""
        known = facts_of_file(self.path)
        known.sha256 = known.sha256 or hashlib.sha256(self.read()).hexdigest()
        return known.sha256

    def data_address(self) -> str:
        """Return the bytes as `data:image/...;base64,...`; of a generic type if it is unknown."""
        content = self.read()
        known = (kind for magic, kind in _MIME.items() if content.startswith(magic))
        other = film_type(content) if is_film("", content) else "application/octet-stream"
        kind = next(known, other)
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"

    @property
    def files(self) -> "tuple[FileSource, ...]":
        """This file alone."""
        return (self,)

    def in_memory(self, read: "Callable[[FileSource], bytes]") -> Self:
        """Return a copy with the bytes that `read` returns for its file."""
        return replace(self, path=None, content=read(self))

    def shown(self) -> "tuple[FileSource, ...]":
        """Return the files for readers that take no films: this one."""
        return (self,)

    def decode(self) -> object:
        """Return values for a processor."""
        return self.read()


class ImageSource(FileSource):
    """Image."""

    kind = "an image as path, bytes, base64 or a Pillow image"

    def size(self) -> tuple[int, int]:
        """Return width and height of `decode`, from the header alone; raise the same errors."""
        with opened(self.read(), self.name) as image:
            return upright_size(image, self.name)

    def whole_size(self) -> tuple[int, int]:
        """Return `size` of a file that is not cut off; decode it if only pixels can show that."""
        known = facts_of_file(self.path)
        if not known.size:
            content = self.read()
            with opened(content, self.name) as image:
                size = upright_size(image, self.name)
                is_read = is_whole(image, content)
            if not is_read:
                self.decode()
            known.size = size
        width, height = known.size
        return width, height

    def decode(self) -> "Image":
        """Return the image in RGB, upright, with transparent pixels in white.

        Raises:
            MediaError: The file is no image, damaged, or larger than `MAX_PIXELS`.
        """
        with opened(self.read(), self.name) as image:
            return as_rgb(image, self.name)


@dataclass(frozen=True)
class VideoSource:
    """Video: a film, an animated image, or its frames.

    Args:
        name: Name for messages.
        frames: One image per frame, or a single film or animated image.
        fps: Frames per second, for a film those to select; None for the rate of file and rules.
        rules: Choice of frames, and their size.
    """

    name: str
    frames: tuple[ImageSource, ...] = field(repr=False)
    fps: float | None = None
    rules: FrameRules = ALL_FRAMES

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its files, its frame rate and its rules."""
        parts = [*(frame.digest for frame in self.frames), str(self.fps), str(self.rules)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def files(self) -> tuple[ImageSource, ...]:
        """Its frames."""
        return self.frames

    def in_memory(self, read: "Callable[[FileSource], bytes]") -> "VideoSource":
        """Return a copy with the bytes that `read` returns for each file."""
        return replace(self, frames=tuple(frame.in_memory(read) for frame in self.frames))

    def size(self) -> tuple[int, int]:
        """Return width and height of the first frame, from its header."""
        first = self.frames[0]
        return film_size(first.read(), first.name) if self._is_film() else first.size()

    def poster(self) -> "Image":
        """Return the first selected frame."""
        from PIL import Image

        return Image.fromarray(self.decode()[0][0])

    def shown(self) -> tuple[ImageSource, ...]:
        """Return the frames as files; for a film, the selected ones."""
        if not self._is_film():
            return self.frames
        from PIL import Image

        files = []
        for number, frame in enumerate(self.decode()[0], start=1):
            buffer = io.BytesIO()
            Image.fromarray(frame).save(buffer, "JPEG", quality=90)
            files.append(ImageSource(f"{self.name}, frame {number}", content=buffer.getvalue()))
        return tuple(files)

    def _is_film(self) -> bool:
        first = self.frames[0]
        return len(self.frames) == 1 and is_film(first.name, first.read())

    def decode(self) -> "tuple[NDArray[np.uint8], dict[str, object]]":
        """Return frames [frames, height, width, 3] and the facts that processors ask for.

        Raises:
            MediaError: A frame cannot be read, sizes differ, or the frame rate is not known.
        """
        if self._is_film():
            rules = replace(self.rules, fps=self.fps or self.rules.fps)
            pixels, rate = read_film(self.frames[0].read(), self.frames[0].name, rules)
            return pixels, _video_facts(pixels, rate, "pyav")
        total = sum(width * height for width, height in (frame.size() for frame in self.frames))
        if total > MAX_VIDEO_PIXELS:
            raise MediaError(
                f"{self.name} has {len(self.frames)} frames of {total} pixels in all: expected at "
                f"most {MAX_VIDEO_PIXELS}; leave frames out or scale them down"
            )
        images, fps = [frame.decode() for frame in self.frames], self.fps
        if len(self.frames) == 1:
            images, file_fps = animation(self.frames[0].read(), self.frames[0].name)
            fps = fps or file_fps
        if not fps:
            raise MediaError(
                f"{self.name} has no frame rate: give an object with frames and fps, for example "
                '{"frames": ["a.png", "b.png"], "fps": 2}'
            )
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise MediaError(f"{self.name} has frames of {len(sizes)} sizes: {sorted(sizes)[:3]}")
        images, fps = self.rules.of_frames(images, fps)
        pixels = np.stack([np.asarray(image) for image in images])
        return pixels, _video_facts(pixels, fps, "pillow")


def _video_facts(frames: "NDArray[np.uint8]", fps: float, backend: str) -> dict[str, object]:
    """Return facts for processors on evenly spaced frames [frames, height, width, 3]."""
    count, height, width, _ = frames.shape
    return {
        "fps": fps,
        "total_num_frames": count,
        "duration": count / fps,
        "frames_indices": list(range(count)),
        "video_backend": backend,
        "width": width,
        "height": height,
    }


def as_image(value: object, *, name: str, folder: Path) -> ImageSource:
    """Make an image from a data set's value.

    Args:
        value: Path or `file://` address, encoded bytes (or a list of their numbers), base64 text
            or data address, object with `bytes`, `path`, `image`, `base64` or `url`, Pillow image,
            or array [height, width] or [height, width, channels].
        name: Place in the data, for messages.
        folder: Folder to which paths are relative.

    Raises:
        MediaError: The value is none of these, or an address that would have to be fetched.
    """
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, Mapping):
        key = named_medium(value, _IMAGE_KEYS, f"{name}: an image object needs bytes or path")
        return as_image(value[key], name=name, folder=folder)
    is_encoded = isinstance(value, str | _BYTES)  # numpy's have an array, too
    if hasattr(value, "__array__") and not is_encoded and not hasattr(value, "save"):
        value = of_array(np.asarray(value), name)
    if hasattr(value, "save") and hasattr(value, "size"):
        buffer = io.BytesIO()
        # Lossless, and fast to write.
        as_rgb(cast("Image", value), name).save(buffer, "PNG", compress_level=1)
        return ImageSource(name, content=buffer.getvalue())
    return ImageSource.of(value, name=name, folder=folder)


def named_medium(value: Mapping[str, object], keys: Sequence[str], problem: str) -> str:
    """Return the first of some keys that has a value; raise a MediaError with the problem."""
    for key in keys:
        if value.get(key) is not None:
            return key
    raise MediaError(f"{problem}, found {sorted(value)}")


def _begins_as_image(text: str) -> bool:
    try:
        begin = base64.b64decode(text[:16], validate=True)
    except (binascii.Error, ValueError):
        return False
    if begin.startswith(b"RIFF"):  # also of sounds and films
        return begin[8:] == b"WEBP"
    return begin.startswith(tuple(_MIME)) or begin[4:8] == b"ftyp"


def _unbase64(text: str, name: str) -> bytes:
    try:
        # MIME wraps lines.
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as err:
        raise MediaError(f"{name}: not valid base64 ({first_line(err)})") from err


def as_video(value: object, *, name: str, folder: Path) -> VideoSource:
    """Make a video from a data set's value.

    Args:
        value: Film, or animated GIF, WebP or PNG, as in `as_image`; object with `frames` and
            `fps`; or list of frames, each as in `as_image`.
        name, folder: Place and folder as in `as_image`.

    Raises:
        MediaError: The value is none of these.
    """
    if isinstance(value, VideoSource):
        return value
    fps: float | None = None
    if isinstance(value, Mapping):
        value, fps = _clip(value, name)
    if isinstance(value, Mapping):
        return as_video(value, name=name, folder=folder)
    value = _frames(value)
    if isinstance(value, list):
        if not 0 < len(value) <= MAX_FRAMES:
            raise MediaError(f"{name} has {len(value)} frames: expected 1 to {MAX_FRAMES}")
        frames = tuple(
            as_image(frame, name=f"{name}, frame {number}", folder=folder)
            for number, frame in enumerate(value, start=1)
        )
        return VideoSource(name, frames, fps)
    return VideoSource(name, (as_image(value, name=name, folder=folder),), fps)


def _checked_rate(rate: object, name: str) -> float:
    low, high = _FPS_RANGE
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not is_number or not low <= cast("float", rate) <= high:
        raise MediaError(
            f"{name}: fps must be a number above 0, from {low:g} to {high:g}, got {str(rate)[:40]}"
        )
    return float(cast("float", rate))


def _clip(value: Mapping[str, object], name: str) -> tuple[object, float | None]:
    """Return an object's video and its frame rate, None if it has none."""
    problem = f"{name}: a video object needs frames or path"
    inner = value[named_medium(value, _VIDEO_KEYS, problem)]
    if isinstance(inner, Mapping) or ("frames" not in value and value.get("fps") is None):
        return inner, None
    return inner, _checked_rate(value.get("fps"), name)


def _frames(value: object) -> object:
    """Convert a sequence or an array to a list of frames; return anything else unchanged."""
    if hasattr(value, "__array__") and np.asarray(value).ndim > 3:
        return list(np.asarray(value))
    is_list = isinstance(value, Sequence) and not isinstance(value, str | _BYTES)
    return (
        list(cast("Sequence[object]", value)) if is_list and not is_list_of_bytes(value) else value
    )
