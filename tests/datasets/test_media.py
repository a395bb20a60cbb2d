"""Images and videos of data rows: every form, every mistake in one line."""

from functools import partial

import pytest
from tests.datasets.media_files import picture, write_bad_media
from tests.datasets.row_files import prompts_of
from tests.models.vision.tiny_world import tiny

from lightrft.config import TrainConfig
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.types import DataError
from lightrft.engines.media.sources import as_video
from lightrft.tools.model_presets import byte_level_tokenizer

CONFIG = TrainConfig(apply_chat_template=True, prompt_max_len=400)
load = partial(prompts_of, CONFIG)


@pytest.fixture(scope="module")
def reader():
    return VisionPrompts(tiny("tiny-qwen2.5-vl")[1])


def test_rows_with_and_without_media_become_prompts(tmp_path, reader):
    picture().save(tmp_path / "a.png")
    picture(56, 112, 1).save(tmp_path / "b.png")
    rows = [
        {"input": "How many?", "images": "a.png"},
        {"input": "no picture"},
        {"input": "<image> before <image>?", "images": ["b.png", "a.png"]},
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "left "},
                        {"type": "image"},
                        {"type": "text", "text": "?"},
                    ],
                }
            ],
            "images": ["b.png"],
        },
    ]
    prompts = load(tmp_path, rows, reader)
    assert [len(p.images) for p in prompts] == [1, 0, 2, 1]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompts[0].text == f"<|user|>{mark}How many?<|assistant|>"
    assert prompts[2].text == f"<|user|>{mark} before {mark}?<|assistant|>"
    assert prompts[3].text == f"<|user|>left {mark}?<|assistant|>"
    for p in prompts:
        again = reader.encoder.encode(p.text, p.media)
        assert p.token_ids == again.token_ids
    # 84 x 84 pixels are 9 tokens, 56 x 112 are 8.
    pad = reader.encoder.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [p.token_ids.count(pad) for p in prompts] == [9, 0, 17, 8]


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


BAD = {
    "missing file": ({"images": "none.png"}, r"train.jsonl:1: image 1: no file .*none\.png"),
    "no image": ({"images": "text.png"}, r"text\.png is no image that can be read"),
    "cut off": ({"images": "cut.jpg"}, r"cut\.jpg is a damaged image"),
    "too large": (
        {"images": "bomb.png"},
        r"bomb\.png (has 20000 x 20000 pixels: expected at most|is larger than)",
    ),
    "address": ({"images": "https://example.org/a.png"}, "would have to be fetched"),
    "base64": ({"images": "data:image/png;base64,???"}, "not valid base64"),
    "kind": ({"images": 3}, "expected an image as path, bytes, base64 or a Pillow image, got int"),
    "limit": ({"images": ["a.png", "a.png"]}, "2 images, more than --limit_mm_image_per_prompt 1"),
    "video without rate": (
        {"videos": [{"frames": ["a.png", "a.png"]}]},
        "fps must be a number above 0",
    ),
    "frames alone": ({"videos": "a.png"}, "has no frame rate"),
    "animated bomb": (
        {"videos": "many.png"},
        r"many\.png has 5000 frames of 8 x 8 pixels: expected at most 4096 frames",
    ),
    "bomb of frames": (
        {"videos": [{"frames": ["large.png"] * 6, "fps": 2}]},
        "has 6 frames of 600000000 pixels in all: expected at most 500000000",
    ),
    "bomb of text": ({"images": "text_bomb.png"}, r"text_bomb\.png is (no|a damaged) image"),
    "film in an object": ({"videos": [{"path": "a.mp4"}]}, r"no file .*a\.mp4"),
    "film": ({"videos": "a.mp4"}, r"no file .*a\.mp4"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_line(name, tmp_path, reader):
    row, message = BAD[name]
    write_bad_media(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, [{"input": "?", **row}], reader, limit_mm_image_per_prompt=1)
    assert "\n" not in str(caught.value)


def test_a_model_of_text_is_never_trained_blind(tmp_path):
    picture().save(tmp_path / "a.png")
    tokenizer = byte_level_tokenizer()
    rows = [{"input": "one"}, {"input": "two", "images": ["a.png"]}]
    with pytest.raises(DataError, match=r":2: column 'images' holds images.*--text_only"):
        load(tmp_path, rows, tokenizer)
    assert len(load(tmp_path, rows, tokenizer, text_only=True)) == 2
