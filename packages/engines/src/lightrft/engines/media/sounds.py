"""Sounds as their original bytes, decoded to one channel at the rate of a model."""

import base64
import hashlib
import io
import struct
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from lightrft.engines.media.containers import opened_container
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.sources import FileSource, named_medium

if TYPE_CHECKING:
    from av import AudioFrame
    from av.container import InputContainer
    from numpy.typing import NDArray

# A shorter sound yields at most one feature.
MIN_SECONDS = 0.1
# Decoders of lossy formats slightly exceed 1.
_MAX_LOUDNESS = 2.0
# Formats whose header has the exact length; others estimate it.
_EXACT = ("wav", "flac", "ogg", "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
# A sound is cut off if it ends this far before the end named by its header.
_MISSING_SECONDS, _MISSING_SHARE = 0.1, 0.05
_FLOATS, _PCM = 3, 1
_KEYS = ("array", "bytes", "audio", "input_audio", "path", "audio_url", "url", "base64", "data")


@dataclass(frozen=True, slots=True)
class SoundRules:
    """Form in which a model takes sounds.

    Args:
        rate: Samples per second.
        max_seconds: Length of the longest sound.
    """

    rate: int = 16_000
    max_seconds: float = 30.0


@dataclass(frozen=True)
class SoundSource(FileSource):
    """Sound.

    Args:
        rules: Form to which it is decoded.
    """

    kind = "a sound as path, bytes or base64"
    rules: SoundRules = SoundRules()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its bytes and its rules."""
        return hashlib.sha256(self.read() + str(self.rules).encode()).hexdigest()

    def by_rules(self, rules: SoundRules) -> "SoundSource":
        """Return the sound with rules for another model."""
        return replace(self, rules=rules)

    def data_address(self) -> str:
        """Return the decoded sound as `data:audio/wav;base64,...`."""
        waveform, rate = self.decode()
        samples = np.rint(np.clip(waveform, -1, 1) * 32767).astype("<i2")
        return f"data:audio/wav;base64,{base64.b64encode(as_wav(samples, rate)).decode()}"

    def decode(self) -> "tuple[NDArray[np.float32], int]":
        """Return the mean of its channels, [samples] with full scale 1, and their rate per second.

        Raises:
            MediaError: The file is no sound, empty, damaged, cut off, shorter than `MIN_SECONDS` or
                longer than the model hears, or PyAV is missing.
        """
        rate, longest = self.rules.rate, self.rules.max_seconds
        waveform = _waveform(self.read(), self.name, self.rules)
        seconds = len(waveform) / rate
        if not MIN_SECONDS <= seconds <= longest + 0.5 / rate:
            more = "more than " * (seconds > longest)
            raise MediaError(
                f"{self.name} lasts {more}{min(seconds, longest):.2f} s: expected {MIN_SECONDS:g} "
                f"to {longest:g} s, which the model hears; cut it"
            )
        if not np.isfinite(waveform).all():
            raise MediaError(f"{self.name} has samples that are not finite: replace it")
        return waveform, rate


def as_wav(samples: "NDArray[np.generic]", rate: int) -> bytes:
    """Convert [samples] or [samples, channels], int16 or float32, to a WAV file."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    code = _FLOATS if samples.dtype.kind == "f" else _PCM
    size, data = samples.dtype.itemsize, np.ascontiguousarray(samples).tobytes()
    form = struct.pack(
        "<HHIIHH", code, channels, rate, rate * channels * size, channels * size, 8 * size
    )
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data"
    body = head + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def as_audio(value: object, *, name: str, folder: Path) -> SoundSource:
    """Make a sound from a data set's value.

    Args:
        value: Path, encoded bytes, base64 text or data address as in `as_image`; or object
            with one of these under `bytes`, `path`, `audio`, `url`, `base64`, `input_audio` or
            `data`, or with `array` [samples] or [channels, samples] and `sampling_rate`.
        name: Place in the data, for messages.
        folder: Folder to which paths are relative.

    Raises:
        MediaError: The value is none of these, or an address that would have to be fetched.
    """
    if isinstance(value, SoundSource):
        return value
    if not isinstance(value, Mapping):
        return SoundSource.of(value, name=name, folder=folder)
    key = named_medium(value, _KEYS, f"{name}: a sound object needs bytes or path")
    if key == "array":
        return SoundSource(name, content=_of_array(value, name))
    if key in ("base64", "data") and isinstance(value[key], str):
        prefix = "" if value[key].startswith("data:") else "data:audio/x;base64,"
        return as_audio(prefix + value[key], name=name, folder=folder)
    return as_audio(value[key], name=name, folder=folder)


def _of_array(value: Mapping[str, object], name: str) -> bytes:
    samples, rate = np.asarray(value["array"]), value.get("sampling_rate")
    is_rate = isinstance(rate, int) and not isinstance(rate, bool) and rate > 0
    if not is_rate or samples.dtype.kind not in "fiu" or samples.ndim not in (1, 2):
        raise MediaError(
            f"{name}: an array of a sound needs numbers [samples] or [channels, samples] and a "
            f"sampling_rate: got shape {list(samples.shape)}, {samples.dtype} and {rate!r}"
        )
    if samples.dtype.kind != "f" and samples.dtype != np.int16:
        raise MediaError(f"{name}: samples must be floats of -1 to 1 or int16: got {samples.dtype}")
    if samples.dtype.kind == "f" and samples.size and abs(samples).max() > _MAX_LOUDNESS:
        raise MediaError(
            f"{name}: samples must be floats of -1 to 1 or int16: got floats up to "
            f"{abs(samples).max():g}; divide those of 16 bits by 32768"
        )
    kind = np.int16 if samples.dtype == np.int16 else np.float32
    return as_wav(samples.T.astype(kind), cast("int", rate))


def _waveform(content: bytes, name: str, rules: SoundRules) -> "NDArray[np.float32]":
    """Return [samples], at most slightly longer than the rules allow."""
    declared = int.from_bytes(content[4:8], "little") + 8
    # Recorders of unknown length write the largest number, or none.
    if content.startswith(b"RIFF") and len(content) < declared < 2**32:
        raise MediaError(
            f"{name} is cut off: its header names {declared} bytes and it has {len(content)}; "
            "replace or leave it out"
        )
    samples = read_plain_wav(content, rules)
    if samples is not None:
        return samples
    extra = "pip install 'lightrft[audio]'"
    with opened_container(content, name, "sound", extra) as container:
        if not container.streams.audio:
            raise MediaError(f"{name} has no sound: replace or leave it out")
        return _resampled(container, name, rules)


def read_plain_wav(content: bytes, rules: SoundRules) -> "NDArray[np.float32] | None":
    """Return a plain WAV file's samples at the model's rate, as FFmpeg does; None for others."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            num_samples = file.getnframes()
            is_plain = file.getsampwidth() == 2 and file.getframerate() == rules.rate
            if not is_plain or not 0 < num_samples <= rules.rate * rules.max_seconds:
                return None
            read = np.frombuffer(file.readframes(num_samples), "<i2")
            channels = read.reshape(-1, file.getnchannels())
    except (wave.Error, EOFError, ValueError):
        return None
    if len(channels) != num_samples:
        return None
    mixed: NDArray[np.float32] = (channels.astype(np.float32) / 32768).mean(1)
    return mixed


def _resampled(container: "InputContainer", name: str, rules: SoundRules) -> "NDArray[np.float32]":
    from av import AudioResampler

    stream = container.streams.audio[0]
    # Not planar: PyAV reads beyond its list of planes if there are eight or more.
    resampler = AudioResampler(format="flt", rate=rules.rate)
    pieces: list[NDArray[np.float32]] = []
    seconds = 0.0
    for frame in (*_frames(container, rules), None):
        if frame is not None:
            seconds += frame.samples / frame.sample_rate
        # Channels are mixed here, since FFmpeg's mix of floats is louder than the channels.
        pieces += [
            out.to_ndarray().reshape(-1, out.layout.nb_channels).mean(1)
            for out in resampler.resample(frame)
        ]
    if not pieces:
        raise MediaError(f"{name} has no samples: replace or leave it out")
    length = stream.duration * stream.time_base if stream.duration and stream.time_base else 0
    is_exact = container.format.name in _EXACT and seconds <= rules.max_seconds
    if is_exact and float(length) - seconds > max(_MISSING_SECONDS, _MISSING_SHARE * length):
        raise MediaError(
            f"{name} is cut off: it lasts {float(length):.2f} s by its header and has "
            f"{seconds:.2f} s; replace or leave it out"
        )
    return np.concatenate(pieces).astype(np.float32)


def _frames(container: "InputContainer", rules: SoundRules) -> "Iterator[AudioFrame]":
    """Yield frames until the model's limit is passed: a small file may last hours."""
    seconds = 0.0
    for frame in container.decode(container.streams.audio[0]):
        yield frame
        seconds += frame.samples / frame.sample_rate
        if seconds > rules.max_seconds + 1:
            return
