"""What is wrong with images and videos ends a run in one line, before any model is built."""

from __future__ import annotations

import json

import pytest
from tests.datasets.media_files import write_bad_media
from tests.models.vision.tiny_families import write_tiny_vision_model

from lightrft.cli.main import main
from lightrft.run import assembly
from lightrft.tools.model_presets import write_tiny_model

DATA = 4
CHAT = ("--apply_chat_template",)
# Kind of the model, the row, further options, and what the message names.
WRONG = {
    "missing file": ("vision", {"images": "none.png"}, CHAT, ":2: image 1: no file"),
    "cut off": ("vision", {"images": "cut.jpg"}, CHAT, "cut.jpg is a damaged image"),
    "bomb": ("vision", {"images": "bomb.png"}, CHAT, "bomb.png"),
    "marks": ("vision", {"input": "<image><image>", "images": "a.png"}, CHAT, "names 2 images"),
    "video without a rate": (
        "vision",
        {"videos": [{"frames": ["a.png", "a.png"]}]},
        CHAT,
        "fps must be",
    ),
    "mark without a picture": (
        "vision",
        {"input": "<image>?"},
        CHAT,
        ":2: the prompt names 1 images",
    ),
    "part without a picture": (
        "vision",
        {"input": [{"role": "user", "content": [{"type": "image"}]}]},
        CHAT,
        ":2: the prompt names 1 images",
    ),
    "place of the model in a text": (
        "vision",
        {"input": "what is <|image_pad|> ?"},
        CHAT,
        ":2: the text of message 1 holds '<|image_pad|>'",
    ),
    "no chat template": (
        "vision",
        {"input": "<image>?", "images": "a.png"},
        (),
        "add --apply_chat",
    ),
    "no place": ("vision", {"images": "a.png"}, (), "0 places <|image_pad|>"),
    "parts for a model of text": (
        "text",
        {"input": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        CHAT,
        ":2: a message has a part of type 'image'",
    ),
    "model of text": ("text", {"images": "a.png"}, (), "--text_only"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "text", "tiny-qwen3", seed=0)
    write_tiny_vision_model(folder / "vision", "tiny-qwen2.5-vl", seed=0)
    return folder


def start(folder, models, kind, row, options):
    write_bad_media(folder)
    rows = [{"input": "?"}, {"input": "?", **row}, *({"input": "?"} for _ in range(16))]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")
    return main(
        [
            "train",
            "--fsdp",
            "--pretrain",
            str(models / kind),
            "--prompt_data",
            "train.jsonl",
            "--reward_fn",
            "reward.py:f",
            "--engine_type",
            "hf",
            "--output_dir",
            "run",
            "--rollout_batch_size",
            "16",
            "--prompt_max_len",
            "400",
            "--generate_max_len",
            "8",
            *options,
        ]
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuse(config):
        raise AssertionError("a strategy was made")

    monkeypatch.setattr(assembly, "get_strategy", refuse)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_command_with_bad_media_ends_before_any_model(folder, models, capsys, name):
    kind, row, options, expected = WRONG[name]
    assert start(folder, models, kind, row, options) == DATA
    text = capsys.readouterr().err
    assert expected in text
    assert len(text.splitlines()) == 1
    assert "Traceback" not in text
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"images": "a.png"},
        {
            "input": [
                {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"text": "?"}]}
            ]
        },
    ],
)
def test_good_media_reach_the_strategy(folder, models, capsys, row):
    assert start(folder, models, "vision", row, CHAT) == 1
    assert "a strategy was made" in capsys.readouterr().err
