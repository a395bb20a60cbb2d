"""Pictures in one form, however they were stored: RGB of 8 bits, upright, on white."""

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from lightrft.kernels.names import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

# A photograph of 100 megapixels takes 300 MB once it is decoded.
MAX_PIXELS = 100_000_000
MAX_FRAMES = 4096
# Formats that are decoded; others of Pillow start programs (EPS) or are accepted without a magic
# number.
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


class MediaError(ValueError):
    """A medium cannot be read; the message says which, why, and what to do."""


def opened(content: bytes, name: str) -> "Image":
    """A picture whose header was read and whose pixels were not.

    Raises:
        MediaError: It has none of `FORMATS`, or more than `MAX_PIXELS`.
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
    """Width and height once the picture is turned as its camera was held; reads no pixels.

    Raises:
        MediaError: Its header is damaged.
    """
    width, height = image.size
    # Pillow gives the size of a TIFF as it is turned, and reads a whole PNG for what stands behind
    # its pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return width, height
    try:
        is_turned = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    except Exception as err:
        raise damaged(name, err) from err
    return (height, width) if is_turned else (width, height)


def damaged(name: str, err: Exception) -> MediaError:
    """The error of what a decoder raises: OSError, SyntaxError, struct.error, EOFError, ..."""
    return MediaError(f"{name} is a damaged image: {first_line(err)}; replace or leave it out")


def as_rgb(image: "Image", name: str) -> "Image":
    """The picture in RGB of 8 bits, turned as its camera was held, what is transparent in white.

    Integers up to 255 count as 8 bits and up to 65535 as 16, floats as 0 to 1 or 0 to 255.

    Raises:
        MediaError: It is damaged, or its numbers lie in no such range.
    """
    from PIL import ImageOps

    try:
        return _on_white(_of_8_bits(ImageOps.exif_transpose(image), name))
    except MediaError:
        raise
    except Exception as err:
        raise damaged(name, err) from err


def _of_8_bits(image: "Image", name: str) -> "Image":
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    has_16_bits = image.mode.startswith("I;16")
    if image.mode == "F":
        limit = 1.0 if high <= 1 else 255.0
    else:
        limit = 65535.0 if has_16_bits or high > 255 else 255.0
    if not (low >= 0 and high <= limit):
        raise MediaError(
            f"{name} has numbers from {low:g} to {high:g}: expected 0 to 255, 0 to 65535 for "
            "integers or 0 to 1 for floats; scale them"
        )
    return Image.fromarray(np.rint(values * (255 / limit)).astype(np.uint8))


def _on_white(image: "Image") -> "Image":
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, layer).convert("RGB")


def animation(content: bytes, name: str) -> "tuple[list[Image], float | None]":
    """Frames of an animated image and how many it shows a second, if it says so.

    Raises:
        MediaError: It is damaged, or has more than `MAX_FRAMES` or `MAX_PIXELS` in all.
    """
    with opened(content, name) as image:
        try:
            count = int(getattr(image, "n_frames", 1))
        except Exception as err:
            raise damaged(name, err) from err
        if count > MAX_FRAMES or count * image.width * image.height > MAX_PIXELS:
            raise MediaError(
                f"{name} has {count} frames of {image.width} x {image.height} pixels: "
                f"expected at most {MAX_FRAMES} frames and {MAX_PIXELS} pixels in all"
            )
        frames, total = [], 0.0
        for number in range(count):
            where = f"{name}, frame {number + 1},"
            try:
                image.seek(number)
                frames.append(as_rgb(image, where))
                # Known once the frame is decoded.
                total += float(image.info.get("duration", 0))
            except MediaError:
                raise
            except Exception as err:
                raise damaged(where, err) from err
        return frames, (1000 * count / total if total else None)
