"""Films for tests, written by PyAV: frame k is grey of shade 10 k."""

import io

import numpy as np

CONTAINERS = {
    "mp4": ("mp4", "libx264"),
    "mov": ("mov", "mpeg4"),
    "mkv": ("matroska", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "avi": ("avi", "mpeg4"),
}
STEP = 10


def film(suffix="mp4", num_frames=20, fps=10, size=(64, 48), times=None, sound=False):
    """Bytes of a film.

    Args:
        times: Of the frames, in units of 1 / 1000 s; None is evenly by `fps`.
        sound: Whether it has a second of silence beside the frames.
    """
    import av

    container, codec = CONTAINERS[suffix]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=1000 if times else fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if num_frames and not times:
            stream.codec_context.gop_size = 5
        hum = add_sound(file) if sound else None
        for i in range(num_frames):
            pixels = np.full((size[1], size[0], 3), STEP * i % 256, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times:
                frame.pts = times[i]
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if hum is not None:
            write_silence(file, hum)
    return buffer.getvalue()


def add_sound(file):
    return file.add_stream("libopus", rate=48000, layout="mono")


def write_silence(file, stream):
    import av

    samples = np.zeros((1, 48000), dtype=np.int16)
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.rate = 48000
    file.mux(stream.encode(frame))
    file.mux(stream.encode())


def sound_alone():
    """Bytes of an mp4 without pictures."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        write_silence(file, add_sound(file))
    return buffer.getvalue()


def turned(content):
    """The same mp4, to be shown a quarter turn to the right, as telephones write it."""
    place = content.index(b"tkhd") + 4 + 40
    matrix = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    values = b"".join(number.to_bytes(4, "big", signed=True) for number in matrix)
    return content[:place] + values + content[place + len(values) :]
