"""Whole runs on rows with images: what they learn, where they load, and what is refused."""

import json

import pytest
import torch
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.runs import row_options, steps, train, train_on_ranks
from tests.stages.vision.vision_rows_world import assistant, chat_rows, seen_alone, user, write_rows
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft.cli.main import main
from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import DataError
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.models import RewardModel, load_config, load_trunk
from lightrft.models.loading import load_processor
from lightrft.trainer import RewardTrainer, SFTTrainer

ASKED = [user("<image>which?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision") / "model"
    write_tiny_vision_model(path, "tiny-qwen2.5-vl", seed=1)
    return str(path)


def pair_rows(num=8):
    """The better answer names the image; every fourth row has none."""
    found = []
    for number in range(num):
        name = "ab"[number % 2]
        row = {"prompt": [user(f"<image>{number}?")], "images": [f"{name}.png"]}
        if number % 4 == 3:
            row = {"prompt": [user(f"{number}?")], "images": None}
        found.append(row | {"chosen": f"{name} please", "rejected": "at once"})
    return found


def run(trainer, model, path, folder, **changes):
    settings = {"actor_learning_rate": 2e-3, "train_batch_size": 4, "eval_data": path, **changes}
    return trainer(TrainConfig(**row_options(model, path, folder, **settings))).train()


@pytest.mark.full
def test_supervised_training_learns_what_is_in_the_image(tmp_path, model):
    chats = [([*ASKED, assistant("a" * 6 if name == "a" else "b" * 6)], [name]) for name in "abab"]
    path = write_rows(tmp_path, chat_rows(chats))
    summary = run(SFTTrainer, model, path, tmp_path / "run", max_epochs=25)
    assert summary.last_eval["eval/loss"] < 0.2 < 1 < summary.first_eval["eval/loss"]
    # The processor lies beside the model, and transformers' own logits agree.
    trained = AutoModelForImageTextToText.from_pretrained(summary.model_dir).eval()
    encoder = PromptEncoder(
        AutoProcessor.from_pretrained(summary.model_dir), family_of(trained.config)
    )
    for chat, names in chats[:2]:
        given, is_trained = seen_alone(encoder, tmp_path, chat, names)
        with torch.no_grad():
            best = trained(**given).logits[0].argmax(-1)
        places = is_trained.nonzero()[0]
        assert best[places - 1].tolist() == given["input_ids"][0, places].tolist()


@pytest.mark.full
def test_a_reward_model_that_sees_images_is_trained_exported_and_loaded(tmp_path, model):
    path = write_rows(tmp_path, pair_rows())
    summary = run(RewardTrainer, model, path, tmp_path / "run", max_epochs=8)
    assert summary.last_eval["eval/accuracy"] == 1.0
    assert summary.last_eval["eval/loss"] < summary.first_eval["eval/loss"]
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(arguments) == 0
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    found = {}
    for folder in (summary.model_dir, tmp_path / "out"):
        scorer = RewardModel.from_pretrained(str(folder)).eval()
        trunk = load_trunk(str(folder)).eval()
        encoder = PromptEncoder(load_processor(str(folder)), family_of(load_config(str(folder))))
        scores = []
        for row in pair_rows():
            for name in ("chosen", "rejected"):
                chat = [*row["prompt"], assistant(row[name])]
                names = [each.removesuffix(".png") for each in row["images"] or ()]
                given, _ = seen_alone(encoder, tmp_path, chat, names)
                with torch.no_grad():
                    hidden = trunk(**given, use_cache=False).last_hidden_state[0, -1]
                    scores.append((scorer.head.weight @ hidden + scorer.head.bias).item())
        found[str(folder)] = torch.tensor(scores, dtype=torch.float64)
    plain, exported = found.values()
    assert config["score_mean"] == pytest.approx(plain.mean().item(), abs=1e-3)
    assert torch.equal(exported, plain)


def test_images_without_a_model_that_reads_them_are_refused(tmp_path):
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(tmp_path / "text", "tiny-qwen3", seed=1)
    rows = [{"prompt": "a", "completion": "b", "images": "a.png"}] * 4
    path = write_rows(tmp_path, rows)
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: column 'images' holds images, and the model"
    ):
        run(SFTTrainer, str(tmp_path / "text"), path, tmp_path / "run")
    summary = run(SFTTrainer, str(tmp_path / "text"), path, tmp_path / "run", text_only=True)
    assert summary.num_steps == 3


def test_steps_with_images_are_not_audited(tmp_path, model):
    path = write_rows(tmp_path, chat_rows())
    with pytest.raises(ConfigError, match="audit_every recomputes rows of text"):
        run(SFTTrainer, model, path, tmp_path / "run", audit_every=1)


@pytest.mark.slow
@pytest.mark.shard("vision")
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_two_ranks_take_the_steps_of_one_with_one_image_in_a_step(tmp_path, model, kind):
    # One of four rows has an image, so that one rank sees none.
    rows = pair_rows()[:4]
    for place, row in enumerate(rows):
        if place:
            row |= {"prompt": [user("no image")], "images": None}
    if kind == "sft":
        rows = [
            {"messages": [*r["prompt"], assistant(r["chosen"])], "images": r["images"]}
            for r in rows
        ]
    path = write_rows(tmp_path, rows)
    changes = {"eval_data": path, "fsdp": True, "max_epochs": 3, "actor_learning_rate": 1e-3}
    settings = row_options(model, path, tmp_path / "one", **changes)
    train({**settings, "stage": kind})
    settings = row_options(model, path, tmp_path / "two", **changes)
    train_on_ranks(2, [{**settings, "stage": kind}])
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 4
    for expected, found in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "eval/loss"):
            if name in expected:
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
