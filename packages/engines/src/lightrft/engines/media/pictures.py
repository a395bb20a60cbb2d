"""Conversion of stored pictures to one form: 8-bit RGB, upright, on white."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from lightrft.engines.media.files import MediaError
from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

# A photograph of 100 megapixels takes 300 MB once decoded.
MAX_PIXELS = 100_000_000
MAX_FRAMES = 4096
# Formats to decode; Pillow's others start programs (EPS) or need no magic number.
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "MPO",
    "AVIF",
    "JPEG2000",
    "ICO",
)
_ORIENTATION = 0x0112
_CHANNELS = (1, 3, 4)


def opened(content: bytes, name: str) -> "Image":
    """Open a picture and read its header, but not its pixels.

    Raises:
        MediaError: The file has none of `FORMATS`, or more than `MAX_PIXELS`.
    """
    from PIL import Image

    Image.init()
    try:
        with warnings.catch_warnings():
            # The size is checked here, before anything is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            known = [item for item in FORMATS if item in Image.OPEN]
            image = Image.open(io.BytesIO(content), formats=known)
    except Image.DecompressionBombError as err:
        raise MediaError(
            f"{name} is larger than {MAX_PIXELS} pixels: {first_line(err)}; scale it down"
        ) from err
    except Exception as err:
        raise MediaError(
            f"{name} is no image that can be read: {first_line(err)}; expected PNG, JPEG, WebP, "
            "GIF, BMP, TIFF, PPM, AVIF, JPEG 2000 or ICO"
        ) from err
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise MediaError(
            f"{name} has {width} x {height} pixels: expected at most {MAX_PIXELS} in all; scale "
            "it down"
        )
    return image


def upright_size(image: "Image", name: str) -> tuple[int, int]:
    """Return width and height of the picture rotated upright, without reading pixels.

    Raises:
        MediaError: The header is damaged.
    """
    width, height = image.size
    # Pillow returns the upright size of a TIFF, and reads a whole PNG to find the data behind
    # its pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return width, height
    with _decoding(name):
        is_turned = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if is_turned else (width, height)


def is_whole(image: "Image", content: bytes) -> bool:
    """Return whether a file has its end, and a PNG its checksums; False if nothing shows it.

    Args:
        image: Picture that was just opened; a PNG is closed.
        content: Bytes of its file.
    """
    if image.format == "PNG":
        with suppress(Exception):  # a damaged chunk raises anything
            image.verify()
            return True
    is_jpeg, is_webp = image.format == "JPEG", image.format == "WEBP"
    size = int.from_bytes(content[4:8], "little")
    return content.endswith(b"\xff\xd9") if is_jpeg else is_webp and len(content) >= 8 + size


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Convert exceptions of decoders: OSError, SyntaxError, struct.error, EOFError, ..."""
    try:
        yield
    except MediaError:
        raise
    except Exception as err:
        raise MediaError(
            f"{name} is a damaged image: {first_line(err)}; replace or leave it out"
        ) from err


def as_rgb(image: "Image", name: str) -> "Image":
    """Convert a picture to 8-bit RGB, rotated upright, with transparent pixels in white.

    Integers up to 255 count as 8 bits and up to 65535 as 16, floats as 0 to 1 or 0 to 255.

    Raises:
        MediaError: The picture is damaged, or its numbers lie in no such range.
    """
    from PIL import ImageOps

    with _decoding(name):
        return _on_white(_of_8_bits(ImageOps.exif_transpose(image), name))


def _of_8_bits(image: "Image", name: str) -> "Image":
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image, dtype=np.float64)
    has_16_bits = image.mode.startswith("I;16")
    scaled = _scaled(values, name, is_float=image.mode == "F", has_16_bits=has_16_bits)
    return Image.fromarray(scaled)


def _scaled(
    values: "NDArray[np.float64]", name: str, *, is_float: bool, has_16_bits: bool = False
) -> "NDArray[np.uint8]":
    low, high = float(values.min()), float(values.max())
    if is_float:
        limit = 1.0 if high <= 1 else 255.0
    else:
        limit = 65535.0 if has_16_bits or high > 255 else 255.0
    if not (low >= 0 and high <= limit):
        raise MediaError(
            f"{name} has numbers from {low:g} to {high:g}: expected 0 to 255, 0 to 65535 for "
            "integers or 0 to 1 for floats; scale them"
        )
    scaled: NDArray[np.uint8] = np.rint(values * (255 / limit)).astype(np.uint8)
    return scaled


def of_array(values: "NDArray[np.generic]", name: str) -> "Image":
    """Make a picture from an array.

    Args:
        values: Array [height, width] or [height, width, channels] with 1, 3 or 4 channels, which
            may come first if the last axis cannot be channels. Integers of 8 or 16 bits, or
            floats: see `as_rgb`.
        name: Name for messages.

    Raises:
        MediaError: The array has another shape, or numbers that no picture has.
    """
    from PIL import Image

    shape = values.shape
    if values.ndim == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    is_known = values.ndim == 2 or (values.ndim == 3 and values.shape[-1] in _CHANNELS)
    if not is_known or not values.size or values.dtype.kind not in "uif":
        raise MediaError(
            f"{name} is an array of shape {list(shape)} and type {values.dtype}: expected numbers "
            "[height, width] or [height, width, channels], 1, 3 or 4 of them"
        )
    if values.dtype != np.uint8:
        values = _scaled(values.astype(np.float64), name, is_float=values.dtype.kind == "f")
    return Image.fromarray(np.ascontiguousarray(values))


def _on_white(image: "Image") -> "Image":
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, layer).convert("RGB")


def animation(content: bytes, name: str) -> "tuple[list[Image], float | None]":
    """Return the frames of an animated image and its rate per second, None if unknown.

    Raises:
        MediaError: The image is damaged, or has more than `MAX_FRAMES` or `MAX_PIXELS` in all.
    """
    with opened(content, name) as image, _decoding(name):
        count = int(getattr(image, "n_frames", 1))
        if count > MAX_FRAMES or count * image.width * image.height > MAX_PIXELS:
            raise MediaError(
                f"{name} has {count} frames of {image.width} x {image.height} pixels: "
                f"expected at most {MAX_FRAMES} frames and {MAX_PIXELS} pixels in all"
            )
        frames, total = [], 0.0
        for number in range(count):
            where = f"{name}, frame {number + 1},"
            with _decoding(where):
                image.seek(number)
                frames.append(as_rgb(image, where))
                # Known once the frame is decoded.
                total += float(image.info.get("duration", 0))
        return frames, (1000 * count / total if total else None)
