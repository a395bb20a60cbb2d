"""Rows of samples with images: recorded by file and hash, read back to the bit, or refused."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.ranks import RankFailure
from tests.runs import rollout_options, row_options, train_on_ranks, write_inputs

from lightrft.config import TrainConfig
from lightrft.config.files import file_sha256
from lightrft.datasets.files import read_sources
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.row_data import RowMediaReader
from lightrft.datasets.scored_rows import score_reader
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.models import load_tokenizer
from lightrft.reporting.rollouts import read_rollout
from lightrft.run.resume import media_sha256
from lightrft.stages.start_checks import load_modality
from lightrft.tools.rows.row_file import RowRequest, write_rows

REWARD = "def score(responses):\n    return [float(ord(r[-1:] or 'a') % 2) for r in responses]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows whose prompts have the same ids, of which images alone tell them apart."""
    folder = tmp_path_factory.mktemp("image_rows")
    write_tiny_vision_model(folder / "model", "tiny-qwen2.5-vl", seed=1)
    for seed, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    held = base64.b64encode((folder / "b.png").read_bytes()).decode()
    images = ["a.png", {"base64": held}]
    rows = [{"input": "<image>which?", "images": [image]} for image in images]
    rows += [{"input": "a text"}, {"input": "another"}]
    return write_inputs(folder, rows, reward=REWARD)


@pytest.fixture(scope="module", params=[1, 2])
def run_folder(folder, request):
    name = f"run_{request.param}"
    options = rollout_options(
        folder,
        name,
        input_key="input",
        apply_chat_template=True,
        train_batch_size=16,
        micro_train_batch_size=4,
        generate_max_len=6,
        prompt_max_len=128,
        max_steps=1,
        save_rollouts=True,
    )
    # Random models seldom end a turn: here the first ids do.
    train_on_ranks(request.param, [options], calls=())
    return folder / name


def recorded(run_folder):
    lines = (run_folder / "rollouts.jsonl").read_bytes().splitlines()
    return [read_rollout(line, "a line") for line in lines]


def test_samples_name_their_images_by_file_and_hash(folder, run_folder):
    found = {
        (Path(each.path).name, each.sha256) for row in recorded(run_folder) for each in row.media
    }
    first, second = (file_sha256(folder / name) for name in ("a.png", "b.png"))
    # The one that is no file is written beside the samples, once.
    assert found == {("a.png", first), (second, second)}
    assert [path.name for path in (run_folder / "media").iterdir()] == [second]
    assert file_sha256(run_folder / "media" / second) == second
    shown = [row for row in recorded(run_folder) if row.media]
    assert len(shown) == 8
    assert len({row.prompt_ids for row in shown}) == 1
    assert len({row.prompt_hash for row in shown}) == 2


def reader_of(folder):
    config = TrainConfig(pretrain=str(folder / "model"), reward_loss="mse")
    tokenizer = load_tokenizer(str(folder / "model"))
    return tokenizer, config, RowMediaReader(load_modality(config, tokenizer))


def rows_of(run_folder, path, **request):
    report = write_rows(RowRequest(run_folder, **request), path)
    assert sum(report.fates.values()) == report.num_sampled == 16
    assert report.fates["with_media"] == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_and_answers_are_read_back_with_their_images(folder, run_folder, tmp_path):
    tokenizer, config, reader = reader_of(folder)
    written = rows_of(run_folder, tmp_path / "scores.jsonl", use="reward", choice="all")
    read = score_reader(
        tokenizer,
        config,
        read_sources(str(tmp_path / "scores.jsonl"), split="train")[0],
        None,
        reader,
    )
    by_id = {row.sample_id: row for row in recorded(run_folder)}
    for row, values in zip(
        read_sources(str(tmp_path / "scores.jsonl"), split="train"), written, strict=True
    ):
        answer, origin = read(row).answer, by_id[values["sample_id"]]
        assert answer.token_ids.tolist() == [*origin.prompt_ids, *origin.response_ids]
        digests = [each.sha256.encode() for each in origin.media]
        assert list(answer.media_digests) == digests
    assert sum("images" in row for row in written) > 2
    rows_of(run_folder, tmp_path / "sft.jsonl", use="sft", choice="best", max_per_prompt=1)
    data = load_supervised(
        str(tmp_path / "sft.jsonl"),
        tokenizer,
        TrainConfig(),
        max_samples=9,
        split="train",
        reader=reader,
    )
    # A prompt with another image is another prompt.
    assert len({row.media_digests for row in data.rows}) == 3
    for row in data.rows:
        tokens = row.token_ids[row.is_trained].tolist()
        assert tokens in [list(each.response_ids) for each in by_id.values()]


def test_changed_images_and_processors_are_refused(folder, run_folder, tmp_path):
    tokenizer, config, reader = reader_of(folder)
    path = tmp_path / "rows.jsonl"
    rows = [row for row in rows_of(run_folder, path, use="reward", choice="all") if "images" in row]
    pairs = [
        {
            "prompt_ids": rows[0]["prompt_ids"],
            "chosen_ids": [5, 6],
            "rejected_ids": [6],
            **{name: rows[0][name] for name in ("prompt_text", "images", "images_sha256")},
        }
    ]

    def load(**changes):
        path.write_text(json.dumps(pairs[0] | changes))
        return load_preferences(
            str(path), tokenizer, config, max_samples=9, split="train", reader=reader
        )

    (pair,) = load().rows
    assert pair.chosen.media_digests == pair.rejected.media_digests != ()
    for changes, message in (
        ({"images_sha256": ["0" * 64]}, "an image has other bytes than images_sha256"),
        ({"prompt_ids": rows[0]["prompt_ids"][1:]}, "prompt_text and images give other tokens"),
        ({"prompt_text": None}, "have images only beside a column prompt_text"),
    ):
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}|rows.jsonl:1: {message}"):
            load(**changes)


@pytest.mark.full
def test_a_run_names_its_images_and_is_not_continued_with_others(folder, tmp_path):
    path = folder / "alone.jsonl"
    path.write_text(json.dumps({"prompt": "<image>?", "completion": "a", "images": "c.png"}))
    (folder / "c.png").write_bytes((folder / "a.png").read_bytes())
    options = row_options(
        folder / "model",
        path,
        tmp_path / "run",
        stage="sft",
        fsdp=True,
        bf16=False,
        apply_chat_template=True,
        train_batch_size=1,
        micro_train_batch_size=1,
        max_epochs=2,
        max_steps=1,
        save_steps=1,
    )
    train_on_ranks(1, [options])
    digest = file_sha256(folder / "c.png")
    inputs = json.loads((tmp_path / "run" / "run.json").read_text())["inputs"]
    assert inputs["media of prompt_data"] == {"sha256": media_sha256([digest.encode()])}
    (folder / "c.png").write_bytes((folder / "b.png").read_bytes())
    more = options | {"max_steps": 2, "load_checkpoint": True}
    with pytest.raises(RankFailure, match=r"this changed: media of prompt_data: contents \w+ ->"):
        train_on_ranks(1, [more])
    train_on_ranks(1, [more | {"allow_changes": True}])
