"""Images and videos of data rows: every form, every mistake in one line."""

from functools import partial

import pytest
from tests.datasets.media_files import picture
from tests.datasets.row_files import prompts_of
from tests.models.vision.tiny_world import tiny

from lightrft.config import TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.engines.media.sources import as_video

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=400)
load = partial(prompts_of, CONFIG)


@pytest.fixture(scope="module")
def reader():
    return VisionPrompts(tiny("tiny-qwen2.5-vl")[1])


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
