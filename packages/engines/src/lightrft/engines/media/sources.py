"""Images and videos as their original bytes, which are read when they are needed."""

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from lightrft.engines.media.pictures import (
    MAX_FRAMES,
    MediaError as MediaError,
    animation,
    as_rgb,
    opened,
    upright_size,
)
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

# All frames of a video together: 1.5 GB once they are decoded.
MAX_VIDEO_PIXELS = 500_000_000
MAX_BYTES = 256 * 1024 * 1024
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
# Frames a second that a video may have.
_FPS_RANGE = (1e-3, 1e4)


@dataclass(frozen=True)
class FileSource:
    """Encoded bytes of a medium, in a file or in memory.

    Args:
        name: For messages: its path, or its place in the data.
        path: Of its file; None if the bytes are given.
        content: Its encoded bytes; None if it is a file.
    """

    name: str
    path: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """Its encoded bytes.

        Raises:
            MediaError: The file is missing or larger than `MAX_BYTES`.
        """
        if self.content is not None:
            return self.content
        try:
            with cast("Path", self.path).open("rb") as file:
                # Some files say that they are empty and have no end.
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
        """SHA-256 of its bytes: two images with one digest are one image."""
        return hashlib.sha256(self.read()).hexdigest()

    @property
    def files(self) -> "tuple[FileSource, ...]":
        """Itself: it is one file."""
        return (self,)

    @property
    def facts(self) -> object:
        """None: its bytes are all of it."""
        return None

    def decode(self) -> object:
        """Values for a processor."""
        return self.read()


class ImageSource(FileSource):
    """One image."""

    def size(self) -> tuple[int, int]:
        """Width and height as `decode` gives them, from the header alone; errors as `decode`."""
        with opened(self.read(), self.name) as image:
            return upright_size(image, self.name)

    def decode(self) -> "Image":
        """The image in RGB, upright, what is transparent in white.

        Raises:
            MediaError: It is no image, damaged, or larger than `MAX_PIXELS`.
        """
        with opened(self.read(), self.name) as image:
            return as_rgb(image, self.name)


@dataclass(frozen=True)
class VideoSource:
    """One video: an animated image, or its frames.

    Args:
        name: For messages.
        frames: One image each, or one animated image.
        fps: Frames a second; None reads it from the animated image.
    """

    name: str
    frames: tuple[ImageSource, ...] = field(repr=False)
    fps: float | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what it is made of."""
        parts = [*(frame.digest for frame in self.frames), str(self.fps)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def files(self) -> tuple[ImageSource, ...]:
        """Its frames."""
        return self.frames

    @property
    def facts(self) -> float | None:
        """Its frame rate."""
        return self.fps

    def size(self) -> tuple[int, int]:
        """Width and height of the first frame, from its header."""
        return self.frames[0].size()

    def decode(self) -> "tuple[NDArray[np.uint8], dict[str, object]]":
        """Frames [frames, height, width, 3] and what processors ask about them.

        Raises:
            MediaError: A frame cannot be read, sizes differ, or the frame rate is not known.
        """
        total = sum(width * height for width, height in (frame.size() for frame in self.frames))
        if total > MAX_VIDEO_PIXELS:
            raise MediaError(
                f"{self.name} has {len(self.frames)} frames of {total} pixels in all: expected at "
                f"most {MAX_VIDEO_PIXELS}; leave frames out or scale them down"
            )
        images, fps = [frame.decode() for frame in self.frames], self.fps
        if len(self.frames) == 1:
            images, own_fps = animation(self.frames[0].read(), self.frames[0].name)
            fps = fps or own_fps
        if not fps:
            raise MediaError(
                f"{self.name} has no frame rate: give an object with frames and fps, for example "
                '{"frames": ["a.png", "b.png"], "fps": 2}'
            )
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise MediaError(f"{self.name} has frames of {len(sizes)} sizes: {sorted(sizes)[:3]}")
        count = len(images)
        facts: dict[str, object] = {
            "fps": fps,
            "total_num_frames": count,
            "duration": count / fps,
            "frames_indices": list(range(count)),
            "video_backend": "pillow",
            "width": images[0].width,
            "height": images[0].height,
        }
        return np.stack([np.asarray(image) for image in images]), facts


def as_image(value: object, *, name: str, folder: Path) -> ImageSource:
    """An image from what data sets hold.

    Args:
        value: A path or `file://` address, encoded bytes, base64 text or a data address, an
            object with `bytes`, `path`, `image` or `url`, or an image of Pillow.
        name: Its place in the data, for messages.
        folder: To which paths are relative.

    Raises:
        MediaError: It is none of these, or an address that would have to be fetched.
    """
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, bytes):
        return ImageSource(name, content=value)
    if isinstance(value, str):
        return _image_of_text(value, name, folder)
    if isinstance(value, Mapping):
        for key in ("bytes", "image", "path", "image_url", "url"):
            if value.get(key) is not None:
                return as_image(value[key], name=name, folder=folder)
        raise MediaError(f"{name}: an image object needs bytes or path, found {sorted(value)}")
    if hasattr(value, "save") and hasattr(value, "size"):
        buffer = io.BytesIO()
        # Lossless, and fast to write.
        as_rgb(cast("Image", value), name).save(buffer, "PNG", compress_level=1)
        return ImageSource(name, content=buffer.getvalue())
    raise MediaError(
        f"{name}: expected an image as path, bytes, base64 or a Pillow image, got "
        f"{type(value).__name__}"
    )


def _image_of_text(text: str, name: str, folder: Path) -> ImageSource:
    if text.startswith(("http://", "https://")):
        raise MediaError(f"{name}: {text[:80]!r} would have to be fetched; store it as a file")
    if text.startswith("data:"):
        return ImageSource(name, content=_unbase64(text.partition(",")[2], name))
    path = folder / text.removeprefix("file://")
    try:
        is_file = path.is_file()
    except OSError:
        # A name longer than the file system allows.
        is_file = False
    if is_file:
        return ImageSource(str(path), path=path)
    # The 12 first bytes tell formats; base64 of an image is longer than any path.
    if len(text) > 1024 or _begins_as_image(text):
        return ImageSource(name, content=_unbase64(text, name))
    raise MediaError(f"{name}: no file {path}; paths are relative to the data file")


def _begins_as_image(text: str) -> bool:
    try:
        begin = base64.b64decode(text[:16], validate=True)
    except (binascii.Error, ValueError):
        return False
    return begin.startswith(_MAGIC) or begin[8:12] == b"WEBP" or begin[4:8] == b"ftyp"


def _unbase64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as err:
        raise MediaError(f"{name}: not valid base64 ({first_line(err)})") from err


def as_video(value: object, *, name: str, folder: Path) -> VideoSource:
    """A video from what data sets hold.

    Args:
        value: An animated GIF, WebP or PNG as for `as_image`, an object with `frames` and `fps`,
            or a list of frames, each as for `as_image`.
        name, folder: See `as_image`.

    Raises:
        MediaError: It is none of these, or needs a video decoder.
    """
    if isinstance(value, VideoSource):
        return value
    fps: float | None = None
    if isinstance(value, Mapping) and "frames" in value:
        rate, value = value.get("fps"), value["frames"]
        low, high = _FPS_RANGE
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not low <= cast("float", rate) <= high:
            raise MediaError(
                f"{name}: fps must be a number above 0, from {low:g} to {high:g}, "
                f"got {str(rate)[:40]}"
            )
        fps = float(cast("float", rate))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not 0 < len(value) <= MAX_FRAMES:
            raise MediaError(f"{name} has {len(value)} frames: expected 1 to {MAX_FRAMES}")
        frames = tuple(
            as_image(frame, name=f"{name}, frame {number}", folder=folder)
            for number, frame in enumerate(value, start=1)
        )
        return VideoSource(name, frames, fps)
    if isinstance(value, str) and Path(value).suffix.lower() in (".mp4", ".mkv", ".avi", ".webm"):
        raise MediaError(
            f"{name}: {value!r} needs a video decoder, which lightrft has none of; store its "
            'frames: {"frames": [...], "fps": 2}'
        )
    return VideoSource(name, (as_image(value, name=name, folder=folder),), fps)
