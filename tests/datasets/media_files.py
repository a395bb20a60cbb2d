"""Pictures, and files that claim to be some."""

import io
import zlib
from functools import cache

import numpy as np
from PIL import Image


def picture(width=84, height=84, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def claiming(side):
    """A PNG of eight pixels a side whose header claims more."""
    content = bytearray(encoded(Image.new("1", (8, 8))))
    content[16:24] = 2 * side.to_bytes(4, "big")
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    return bytes(content)


def claiming_frames(count):
    """An animated PNG of two frames whose header claims more."""
    buffer = io.BytesIO()
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 9)]
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:], duration=40)
    content = bytearray(buffer.getvalue())
    place = content.index(b"acTL")
    content[place + 4 : place + 8] = count.to_bytes(4, "big")
    checked = zlib.crc32(bytes(content[place : place + 12]))
    content[place + 12 : place + 16] = checked.to_bytes(4, "big")
    return bytes(content)


@cache
def with_text(size):
    """A PNG with a compressed comment of so many bytes."""
    body = b"zTXtcomment\0\0" + zlib.compress(bytes(size))
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    content = encoded(picture())
    return content[:33] + chunk + content[33:]


def write_bad_media(folder):
    """One good picture, and files that no run may take."""
    picture().save(folder / "a.png")
    (folder / "text.png").write_text("hello")
    (folder / "cut.jpg").write_bytes(encoded(picture(), "JPEG")[:700])
    (folder / "bomb.png").write_bytes(claiming(20000))
    (folder / "large.png").write_bytes(claiming(10000))
    (folder / "text_bomb.png").write_bytes(with_text(20_000_000))
    (folder / "many.png").write_bytes(claiming_frames(5000))


def write_bad_sounds(folder):
    """Write one good sound, and files that no run may hear."""
    from tests.datasets.film_files import film

    from lightrft.engines.media.sounds import as_wav

    tone = np.sin(np.arange(16000) / 5).astype(np.float32)
    whole = as_wav(tone, 16000)
    (folder / "a.wav").write_bytes(whole)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "film.mp4").write_bytes(film(num_frames=4))
    (folder / "long.wav").write_bytes(as_wav(np.tile(tone, 7), 16000))
    (folder / "short.wav").write_bytes(as_wav(tone[:800], 16000))
    (folder / "nan.wav").write_bytes(as_wav(np.full(8000, np.nan, np.float32), 16000))
