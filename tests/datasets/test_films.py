"""Films: the frames that are taken, their times and sizes, and what cannot be read."""

import base64
import random
from functools import partial

import numpy as np
import pytest
from tests.datasets.film_files import CONTAINERS, STEP, film, sound_alone, turned
from tests.datasets.media_files import picture
from tests.datasets.row_files import prompts_of
from tests.models.vision.tiny_world import prompt, tiny

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.types import DataError
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.films import FrameRules, read_film
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import VideoSource, as_video
from lightrft.engines.types import MediaBounds
from lightrft.records.media import MediaSources, pack_sources, unpack_sources
from lightrft.stages.start_checks import limit_pixels

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=2000)
load = partial(prompts_of, CONFIG)


@pytest.fixture(scope="module")
def reader():
    return VisionPrompts(tiny("tiny-qwen3-vl")[1])


def numbers(frames):
    """Of grey frames, which of the film they are."""
    return np.rint(frames.mean((1, 2, 3)) / STEP).astype(int).tolist()


@pytest.mark.parametrize("suffix", CONTAINERS)
def test_two_frames_a_second_are_taken_of_every_container(suffix):
    frames, rate = read_film(film(suffix), f"a.{suffix}")
    assert (frames.shape, rate) == ((4, 48, 64, 3), 2)
    assert numbers(frames) == [0, 5, 10, 15]


def shown_at(times, seconds):
    """The slow obvious rule: the last frame that has begun, to the millisecond."""
    return [max(i for i, t in enumerate(times) if t <= at + 0.001) for at in seconds]


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "webm", "mov"])
def test_a_frame_is_what_the_film_shows_at_its_time(suffix):
    rng = random.Random(3)
    for longest in (40, 400, 4000):
        steps = [rng.choice((10, longest // 10, longest)) for _ in range(15)]
        times = [sum(steps[:i]) for i in range(15)]
        content = film(suffix, 15, times=times)
        seconds = (times[-1] - times[0]) / 1000 * 15 / 14
        for fps in (1.0, 2.0, 3.3):
            frames, rate = read_film(content, "a", FrameRules(fps=fps))
            assert rate == pytest.approx(min(fps, 15 / seconds))
            assert abs(len(frames) - seconds * rate) <= 1
            at = [k / rate for k in range(len(frames))]
            assert numbers(frames) == shown_at([t / 1000 for t in times], at)


def test_options_bound_number_and_size(tmp_path):
    content = film(num_frames=24, fps=12, size=(160, 96))
    rules = FrameRules(fps=100, max_frames=6, max_pixels=5000, multiple=28)
    frames, rate = read_film(content, "a", rules)
    assert rate == 3  # never more than there are, then six of two seconds
    assert numbers(frames) == [0, 4, 8, 12, 16, 20]
    assert frames.shape[1:3] == (28, 84)
    assert read_film(content, "a", FrameRules(min_pixels=20000, multiple=28))[0].shape[1:3] == (
        112,
        196,
    )
    # The same rules take the same of frames and of animations.
    frames = tuple(picture(160, 96, i) for i in range(24))
    clip = as_video({"frames": frames, "fps": 12}, name="x", folder=tmp_path)
    (video,) = Media({"video": [clip]}).by_rules(rules).videos
    pixels, facts = video.decode()
    assert (facts["fps"], pixels.shape) == (3, (6, 28, 84, 3))
    same = frames[4].resize((84, 28), 3)
    assert np.array_equal(pixels[1], np.asarray(same))
    assert clip.decode()[0].shape == (24, 96, 160, 3)
    assert clip.digest != video.digest


def test_a_row_says_how_many_frames_it_wants(tmp_path, reader):
    (tmp_path / "a.webm").write_bytes(film("webm"))
    address = "data:video/mp4;base64," + base64.b64encode(film()).decode()
    rows = [
        {"input": "?", "videos": "a.webm"},
        {"input": "?", "videos": {"path": "a.webm", "fps": 1}},
        {"input": [{"role": "user", "content": [{"type": "video_url", "video_url": address}]}]},
    ]
    rows[2]["input"][0]["content"].append({"type": "text", "text": "?"})
    for options, expected in (
        ({}, [4, 2, 4]),
        ({"video_fps": 5, "video_max_frames": 8}, [8, 2, 8]),
    ):
        loaded = load(tmp_path, rows, reader, **options)
        assert [len(p.media.videos[0].decode()[0]) for p in loaded] == expected


def test_a_video_has_frames_and_a_rate(tmp_path, reader):
    frames = [picture(56, 56, i) for i in range(4)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=500)
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
    listed = {"frames": [f"{i}.png" for i in range(4)], "fps": 2}
    prompts = load(
        tmp_path,
        [{"input": "<video>?", "videos": ["a.gif"]}, {"input": "<video>?", "videos": [listed]}],
        reader,
    )
    pad = reader.encoder.processor.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert [p.token_ids.count(pad) for p in prompts] == [8, 8]
    assert as_video("a.gif", name="x", folder=tmp_path).decode()[1]["fps"] == 2


def test_time_stamps_are_those_of_the_frames(tmp_path, reader):
    """Qwen3-VL writes them into the text, Qwen2.5-VL spaces positions by them."""
    (tmp_path / "a.mp4").write_bytes(film(num_frames=40))
    (row,) = load(tmp_path, [{"input": "?", "videos": "a.mp4"}], reader)
    text = reader.encoder.processor.tokenizer.decode(row.token_ids)
    # Frames at 0, 0.5, 1, ..., two of them in each block.
    for seconds in ("<0.2 seconds>", "<1.2 seconds>", "<2.2 seconds>", "<3.2 seconds>"):
        assert seconds in text
    _, encoder = tiny("tiny-qwen2.5-vl")
    for fps in (2.0, 4.0):
        media = Media({"video": [as_video("a.mp4", name="x", folder=tmp_path)]})
        encoded = encoder.encode(
            prompt(encoder, "?", 0, 1),
            media.by_rules(encoder.frame_rules(MediaBounds(None, None, video_fps=fps))),
        )
        assert float(encoded.tensors["second_per_grid_ts"][0]) == 2 / fps


@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_pixels_are_bounded_frame_by_frame(preset, tmp_path):
    """Before, `--max_pixels` left frames as they were."""
    (tmp_path / "a.mp4").write_bytes(film(size=(224, 168)))
    _, encoder = tiny(preset)
    own = VisionPrompts(encoder)
    parts = encoder.processor.image_processor, encoder.processor.video_processor
    kept = [dict(part.size) for part in parts]
    try:
        for side in (56, 112):
            config = CONFIG.replaced({"max_pixels": side * side})
            limit_pixels(encoder.processor, config)
            (row,) = load(tmp_path, [{"input": "?", "videos": "a.mp4"}], own, max_pixels=side**2)
            encoder.forget()
            encoded = encoder.encode(row.text, row.media)
            grid = encoded.tensors["video_grid_thw"][0]
            assert grid[0] == 2
            assert 0.3 * side**2 <= int(grid[1:].prod()) * 14**2 <= side**2
            # What an engine is given: the same frames.
            frames, _ = row.media.videos[0].decode()
            assert frames.shape[1] * frames.shape[2] <= side**2
    finally:
        for part, size in zip(parts, kept, strict=True):
            part.size = size


def test_bounds_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="min_pixels"):
        TrainConfig(min_pixels=160000, max_pixels=10000)


def test_a_film_is_turned_as_its_camera_was_held():
    upright = film(size=(64, 32), num_frames=2)
    frames, _ = read_film(upright, "a")
    side, _ = read_film(turned(upright), "a")
    assert frames.shape == (1, 32, 64, 3)
    assert side.shape == (1, 64, 32, 3)


def test_cover_pictures_are_no_film_and_sound_beside_one_does_no_harm():
    frames, _ = read_film(film("mkv", sound=True), "a.mkv")
    assert numbers(frames) == [0, 5, 10, 15]


WRONG = {
    "empty": (b"", "is an empty file"),
    "no film": (b"nothing" * 50, "is a damaged film, or none"),
    "cut": (film()[:900], "is a damaged film, or none"),
    "cut within": (film("webm")[:500], "is cut off: it lasts 2.0 s by its header and has 0."),
    "sound": (sound_alone(), "contains no video stream, only sound"),
    "no frames": (film("mkv")[:891], "has no frames"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_whole_film_is_refused_with_row_and_file(name, tmp_path, reader):
    content, message = WRONG[name]
    (tmp_path / "good.mp4").write_bytes(film(num_frames=4))
    (tmp_path / "bad.mp4").write_bytes(content)
    rows = [{"input": "?", "videos": "good.mp4"}, {"input": "?", "videos": "bad.mp4"}]
    with pytest.raises(DataError, match=rf"train\.jsonl:2: .*bad\.mp4 ({message})") as caught:
        load(tmp_path, rows, reader)
    assert "\n" not in str(caught.value)


def test_a_film_of_too_many_pixels_is_refused_before_it_is_decoded():
    rules = FrameRules(fps=10, min_pixels=64 * 48 * 10_000)
    with pytest.raises(MediaError, match=r"gives 20 frames of 6400 x 4800 .* lower --video_fps"):
        read_film(film(), "long.mp4", rules)


def test_without_pyav_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"needs PyAV: pip install 'lightrft\[video\]'"):
        read_film(b"\x1a\x45\xdf\xa3", "a.mkv")


def test_films_travel_as_their_bytes_with_their_rules(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    media = Media({"video": [as_video("a.mp4", name="x", folder=tmp_path)]})
    media = media.by_rules(FrameRules(fps=5))
    ((_, again),) = unpack_sources(pack_sources({5: MediaSources("text", media)}, [5]))
    (video,) = again.media.videos
    assert isinstance(video, VideoSource)
    assert video.digest == media.videos[0].digest
    assert np.array_equal(video.decode()[0], media.videos[0].decode()[0])
    # Services and judges get the frames that the model saw.
    assert len(media.data_addresses()) == 10
    assert all(a.startswith("data:image/jpeg") for a in media.data_addresses())
    assert media.videos[0].poster().size == (64, 48)


def test_another_part_of_a_film_has_another_name(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film())
    video = as_video("a.mp4", name="x", folder=tmp_path)
    names = {Media({"video": [video]}).by_rules(FrameRules(fps=f)).videos[0].digest for f in (1, 2)}
    assert len(names) == 2
