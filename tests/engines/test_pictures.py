"""Every way in which a picture is stored gives the same picture to the model."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from lightrft.engines.media.files import MediaError
from lightrft.engines.media.sources import as_image, as_video

Image = pytest.importorskip("PIL.Image")

SIZE = (64, 4)  # width, height
RAMP = np.tile(np.linspace(0, 1, SIZE[0]), (SIZE[1], 1))
BYTES = np.rint(RAMP * 255).astype(np.uint8)
WORDS = np.rint(RAMP * 65535).astype(np.uint16)
# Black where it is opaque, which is the right half.
DRAWING = np.zeros((SIZE[1], SIZE[0], 4), np.uint8)
DRAWING[:, SIZE[0] // 2 :, 3] = 255
ORIENTATION = 0x0112


def palette_with_transparency():
    image = Image.fromarray(np.where(DRAWING[..., 3] > 0, 1, 0).astype(np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 0, 0])
    image.info["transparency"] = 0
    return image


def grey_with_transparent_value():
    image = Image.fromarray(np.where(DRAWING[..., 3] > 0, 0, 7).astype(np.uint8), "L")
    image.info["transparency"] = 7
    return image


# name: (picture, expected mean of all values, formats that can hold it)
LOSSLESS = ("PNG", "TIFF")
MODES = {
    "grey": (Image.fromarray(BYTES), 127.5, ("PNG", "TIFF", "BMP", "WEBP", "PPM", "JPEG", "GIF")),
    "colour": (
        Image.fromarray(np.stack([BYTES] * 3, -1)),
        127.5,
        ("PNG", "TIFF", "BMP", "WEBP", "PPM", "JPEG"),
    ),
    "grey of 16 bits": (Image.fromarray(WORDS), 127.5, (*LOSSLESS, "PPM")),
    "integers up to 65535": (Image.fromarray(WORDS.astype(np.int32)), 127.5, ("TIFF",)),
    "integers up to 255": (Image.fromarray(BYTES.astype(np.int32)), 127.5, ("TIFF",)),
    "floats up to 1": (Image.fromarray(RAMP.astype(np.float32)), 127.5, ("TIFF",)),
    "floats up to 255": (Image.fromarray((RAMP * 255).astype(np.float32)), 127.5, ("TIFF",)),
    "black and white": (Image.fromarray(BYTES > 127), 127.5, (*LOSSLESS, "BMP", "PPM", "GIF")),
    "drawing, RGBA": (Image.fromarray(DRAWING), 127.5, (*LOSSLESS, "WEBP", "ICO")),
    "drawing, LA": (Image.fromarray(DRAWING).convert("LA"), 127.5, LOSSLESS),
    "drawing, palette": (palette_with_transparency(), 127.5, ("PNG", "GIF")),
    "drawing, grey value": (grey_with_transparent_value(), 127.5, ("PNG",)),
    "print colours": (Image.fromarray(BYTES).convert("CMYK"), 127.5, ("TIFF", "JPEG")),
}
FORMS = [(mode, form) for mode, (_, _, forms) in MODES.items() for form in forms]


def encoded(image, form, **options):
    buffer = io.BytesIO()
    sizes = {"sizes": [image.size]} if form == "ICO" else {}
    lossless = {"lossless": True} if form == "WEBP" else {}
    image.save(buffer, form, **sizes, **lossless, **options)
    return buffer.getvalue()


def ways_in(image, form, folder):
    content = encoded(image, form)
    path = folder / f"picture.{form.lower()}"
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    return {
        "bytes": content,
        "path": path.name,
        "address": f"data:image/x;base64,{text}",
        "opened": Image.open(io.BytesIO(content)),
    }


@pytest.mark.parametrize("mode, form", FORMS)
def test_the_mean_is_that_of_what_a_person_sees(mode, form, tmp_path):
    image, expected, _ = MODES[mode]
    for way, value in ways_in(image, form, tmp_path).items():
        decoded = as_image(value, name="x", folder=tmp_path).decode()
        assert decoded.mode == "RGB"
        assert np.asarray(decoded).mean() == pytest.approx(expected, abs=1.5), way


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_turned_camera_gives_one_picture_however_it_comes_in(orientation, form, tmp_path):
    upright = np.zeros((40, 80, 3), np.uint8)
    upright[:20, :40] = 255  # bright at the upper left
    stored = Image.fromarray(upright)
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    if orientation in undo:
        stored = stored.transpose(undo[orientation])
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    content = encoded(stored, form, exif=exif)
    for value in (content, Image.open(io.BytesIO(content))):
        source = as_image(value, name="x", folder=tmp_path)
        pixels = np.asarray(source.decode()).astype(int)
        assert source.size() == (80, 40)
        assert abs(pixels - upright).mean() < 3


@pytest.mark.parametrize(
    "values",
    [
        np.full((4, 4), 70000, np.int32),
        np.full((4, 4), -1, np.int32),
        np.full((4, 4), 256.5, np.float32),
        np.full((4, 4), np.nan, np.float32),
    ],
)
def test_numbers_without_a_known_range_are_refused(values, tmp_path):
    content = encoded(Image.fromarray(values), "TIFF")
    with pytest.raises(MediaError, match=r"^x has numbers from .*expected 0 to 255"):
        as_image(content, name="x", folder=tmp_path).decode()


def test_no_program_is_started_for_a_picture(tmp_path, monkeypatch):
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    with pytest.raises(MediaError, match="x is no image that can be read"):
        as_image(content, name="x", folder=tmp_path).decode()
    assert not (tmp_path / "started").exists()


def test_base64_of_a_small_picture_is_a_picture(tmp_path):
    content = encoded(Image.fromarray(BYTES[:4, :4].copy()), "PNG")
    text = base64.b64encode(content).decode()
    assert len(text) < 1024
    assert as_image(text, name="x", folder=tmp_path).read() == content
    assert as_image(np.bytes_(content), name="x", folder=tmp_path).read() == content
    (tmp_path / "q.png").write_bytes(content)
    assert as_image(np.str_("q.png"), name="x", folder=tmp_path).read() == content
    sound = base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()
    for missing in ("picture.png", sound):
        with pytest.raises(MediaError, match="no file"):
            as_image(missing, name="x", folder=tmp_path)


def test_a_name_longer_than_the_file_system_allows_is_one_line(tmp_path):
    with pytest.raises(MediaError, match=r"^row 3: no file"):
        as_image("n" * 300, name="row 3", folder=tmp_path)


def test_a_file_that_says_it_is_empty_is_read_up_to_the_limit(monkeypatch):
    monkeypatch.setattr("lightrft.engines.media.sources.MAX_BYTES", 100)
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    source = as_image(str(path), name="row 3", folder=path.parent)
    with pytest.raises(MediaError, match="has more than 100 bytes"):
        source.read()


@pytest.mark.parametrize("rate", [0, -1, 1e-320, 2e4, float("inf"), float("nan"), 10**400, True])
def test_a_rate_that_no_video_has_is_refused(rate, tmp_path):
    with pytest.raises(MediaError, match="fps must be a number above 0"):
        as_video({"frames": [b""], "fps": rate}, name="x", folder=tmp_path)
