"""Sounds of data rows: every form, one waveform, every mistake in one line."""

import base64
import io
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.film_files import sound_alone
from tests.datasets.row_files import prompts_of
from tests.models.audio.sound_world import as_sound, sound, tiny, tone

from lightrft.config import TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.media import Media
from lightrft.engines.media.sounds import SoundRules, as_audio, as_wav
from lightrft.records.media import MediaSources, pack_sources, unpack_sources

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=400)
load = partial(prompts_of, CONFIG)


@pytest.fixture(scope="module")
def reader():
    return VisionPrompts(tiny()[1])


def stored(samples, suffix, codec, rate=16000):
    """A sound in another format."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=suffix) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.rint(samples[None] * 32767).astype(np.int16), format="s16", layout="mono"
        )
        frame.rate = rate
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def test_a_sound_is_the_same_in_every_form(tmp_path):
    content = as_wav(tone(), 16000)
    (tmp_path / "a.wav").write_bytes(content)
    text = base64.b64encode(content).decode()
    forms = [
        "a.wav",
        f"file://{tmp_path / 'a.wav'}",
        content,
        list(content),
        f"data:audio/wav;base64,{text}",
        {"bytes": content, "path": None},
        {"path": "a.wav"},
        {"audio": "a.wav"},
        {"url": f"data:audio/wav;base64,{text}"},
        {"input_audio": {"data": text, "format": "wav"}},
        {"array": tone(), "sampling_rate": 16000, "path": None},
        {"array": tone().tolist(), "sampling_rate": 16000},
    ]
    found = [as_audio(form, name="x", folder=tmp_path).decode() for form in forms]
    assert all(rate == 16000 for _, rate in found)
    assert all(np.array_equal(wave, tone()) for wave, _ in found)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_become_that_of_the_model(rate):
    """Against the sine itself, away from the ends, where filters reach beyond the sound."""
    wave, found = as_sound(tone(0.8, 440, rate), rate).decode()
    assert found == 16000
    assert abs(len(wave) - 12800) <= 1
    expected = tone(0.8)[200:-200]
    assert np.abs(wave[200:12600] - expected[: len(wave[200:12600])]).max() < 1e-3


@pytest.mark.parametrize("channels", [1, 2])
def test_a_plain_wav_file_is_what_ffmpeg_reads(channels, monkeypatch):
    noise = np.random.default_rng(0).integers(-32768, 32768, (4000, channels), dtype=np.int16)
    source = as_audio(as_wav(noise, 16000), name="x", folder=Path())
    found, _ = source.decode()
    monkeypatch.setattr("lightrft.engines.media.sounds.read_plain_wav", lambda *_: None)
    expected, _ = source.decode()
    assert np.array_equal(found, expected)
    assert len(found) == 4000


def test_channels_are_averaged():
    """FFmpeg's own mixture would be louder."""
    left, right = tone(0.5, 300), tone(0.5, 700)
    wave, _ = as_sound(np.stack([left, right])).decode()
    assert np.allclose(wave, (left + right) / 2, atol=1e-6)
    wave, _ = as_sound((32767 * left).astype(np.int16)).decode()
    assert np.allclose(wave, left, atol=1e-4)


@pytest.mark.parametrize(
    "suffix, codec, rate, tolerance",
    [
        ("flac", "flac", 16000, 1e-4),
        ("mp3", "libmp3lame", 16000, 0.1),
        ("ogg", "libopus", 48000, 0.1),
        ("mp4", "aac", 16000, 0.1),
    ],
)
def test_usual_formats_are_read(suffix, codec, rate, tolerance):
    samples = tone(1.0, rate=rate, loudness=0.3)
    wave, _ = as_audio(stored(samples, suffix, codec, rate), name="x", folder=None).decode()
    assert 0.95 < len(wave) / 16000 < 1.15
    middle = wave[4000:12000]
    assert abs(np.sqrt((middle**2).mean()) - np.sqrt((samples**2).mean())) < tolerance
    # It is the same tone.
    assert np.abs(np.fft.rfft(middle)).argmax() == 440 * len(middle) // 16000


def test_rows_name_their_sounds_by_columns_and_by_parts(tmp_path, reader):
    (tmp_path / "a.wav").write_bytes(as_wav(tone(1.0), 16000))
    (tmp_path / "b.wav").write_bytes(as_wav(tone(0.5), 16000))
    data = base64.b64encode((tmp_path / "b.wav").read_bytes()).decode()

    asked = (
        '{"input": [{"role": "user", "content": [%s, {"type": "text", "text": "How high?"}]}]%s}'
    )
    rows = [
        '{"input": "How high?", "audios": ["a.wav"]}',
        '{"input": "<audio> or <audio>?", "audio": ["a.wav", "b.wav"]}',
        '{"input": "no sound"}',
        asked % ('{"type": "audio", "audio": "b.wav"}', ""),
        asked % ('{"type": "audio"}', ', "audios": "b.wav"'),
        asked % ('{"type": "audio_url", "audio_url": {"url": "data:a;base64,DATA"}}', ""),
        asked % ('{"type": "input_audio", "input_audio": {"data": "DATA", "format": "wav"}}', ""),
    ]
    rows = [json.loads(row.replace("DATA", data)) for row in rows]
    found = load(tmp_path, rows, reader)
    assert [len(p.media.audios) for p in found] == [1, 2, 0, 1, 1, 1, 1]
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    assert found[0].text == f"<|user|>{mark}How high?<|assistant|>"
    assert found[1].text == f"<|user|>{mark} or {mark}?<|assistant|>"
    place = reader.encoder.processor.audio_token_id
    assert [p.token_ids.count(place) for p in found] == [25, 37, 0, 12, 12, 12, 12]
    assert len({p.token_ids for p in found[3:]}) == 1
    found = load(tmp_path, [{"input": "?", "speech": "a.wav"}], reader, audios_key="speech")
    assert len(found[0].media.audios) == 1
    assert len(load(tmp_path, rows[:1], reader, text_only=True)[0].media.audios) == 0


def test_damaged_sounds_end_in_one_error():
    rng = random.Random(0)
    content, refused = stored(tone(0.3), "flac", "flac"), 0
    for _ in range(80):
        changed = bytearray(content)
        for _ in range(4):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            as_audio(bytes(changed), name="x", folder=None).decode()
        except MediaError:
            refused += 1
    assert refused > 3


def test_the_sound_of_a_film_is_a_sound():
    wave, _ = as_audio(sound_alone(), name="x", folder=None).decode()
    assert 0.9 < len(wave) / 16000 < 1.1


def test_without_pyav_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"needs PyAV: pip install 'lightrft\[audio\]'"):
        sound().decode()


def test_sounds_travel_as_their_bytes_with_their_rules():
    rules = SoundRules(8000, 4.0)
    media = Media({"audio": [sound(), sound(0.5, 1)]}).by_rules(None, rules)
    ((_, again),) = unpack_sources(pack_sources({5: MediaSources("text", media)}, [5]))
    assert [s.rules for s in again.media.audios] == [rules, rules]
    assert [s.digest for s in again.media] == [s.digest for s in media]
    for one, other in zip(again.media, media, strict=True):
        assert np.array_equal(one.decode()[0], other.decode()[0])
    assert media.audios[0].digest != sound().digest
    address = media.data_addresses()[0]
    heard, _ = as_audio(address, name="x", folder=None).decode()
    assert abs(len(heard) - 16000) <= 1


@pytest.mark.parametrize("channels", [7, 8, 9, 32])
def test_sounds_of_many_channels_are_averaged(channels):
    """PyAV reads beyond its list of planes, and the process ends, where these are eight or more."""
    loudness = np.linspace(0.1, 0.5, channels)
    many = np.stack([tone(0.5, 440, 44100, loud) for loud in loudness], axis=1)
    wave, _ = as_audio(as_wav(many, 44100), name="x", folder=Path()).decode()
    expected, _ = as_audio(as_wav(many.mean(1), 44100), name="x", folder=Path()).decode()
    assert np.allclose(wave, expected, atol=1e-6)
