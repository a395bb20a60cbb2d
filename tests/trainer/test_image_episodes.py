"""Whole runs on an environment and an agent that show images, in one process and on two ranks."""

from pathlib import Path

import pytest
from tests.models.vision.test_derived_families import written
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.rollout.image_environments import squares
from tests.runs import calling, lines, rollout_options, train, with_stops, write_inputs
from tests.trainer.test_environment_run import REWARD

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.config import ConfigError
from lightrft.rollout.environments.calls import ToolCall
from lightrft.tools.replay import run_replay

pytestmark = pytest.mark.shard("vision")

ROLLOUT = Path(__file__).parent.parent / "rollout"
ALBUM = {"environment": f"{ROLLOUT / 'image_environments.py'}:Album"}
AGENT = {"agent": f"{ROLLOUT / 'agents' / 'image_agents.py'}:album"}


def write_rows(folder):
    """Eight rows, of which every other one has an image."""
    rows = []
    for i in range(8):
        row = {"prompt": f"Look {i}.", "number": i}
        if i % 2:
            squares(100 + i, (84, 56)).save(folder / f"{i}.png")
            row |= {"prompt": f"<image>Look {i}.", "images": [f"{i}.png"]}
        rows.append(row)
    return write_inputs(folder, rows, reward=REWARD)


def options_of(folder, name, **changes):
    common = {
        "apply_chat_template": True,
        "system_prompt": "Turn the pages.",
        "label_key": "number",
        "environment_workers": 1,
        "max_turns": 3,
        "n_samples_per_prompt": 2,
        "micro_train_batch_size": 4,
        "prompt_max_len": 200,
        "generate_max_len": 16,
    }
    return rollout_options(folder, name, **common | changes)


def train_here(folder, **changes):
    write_tiny_vision_model(folder / "model", "tiny-qwen2.5-vl", seed=1)
    with calling(ToolCall("turn")):
        train(options_of(write_rows(folder), "run", **changes))
    return folder / "run"


def require_reported(output, images):
    assert main(["report", str(output)]) == ExitCode.OK
    page = (output / "report.html").read_text()
    assert all(image in page for image in images)


@pytest.mark.full
def test_a_run_shows_and_trains_the_images_of_all_turns(tmp_path):
    output = train_here(tmp_path, **ALBUM)
    steps = lines(output / "metrics.jsonl")
    assert len(steps) == 2
    for step in steps:
        assert step["logprob_diff_max/media"] < 1e-5
        assert step["episode/turns"] > 1.2
        assert step["reward/Album"] > 0
    samples = lines(output / "samples.jsonl")
    for sample in samples:
        num_pages = len([call for turn in sample["turns"][:-1] for call in turn["calls"]])
        has_own = "<|image_pad|><|vision_end|>Look" in sample["prompt"]
        assert len(sample["images"]) == has_own + 1 + num_pages
        assert len(set(sample["images"])) == len(sample["images"])
        assert all("[image " in call["answer"] for t in sample["turns"] for call in t["calls"])
    assert max(len(sample["turns"]) for sample in samples) == 3
    require_reported(output, max((s["images"] for s in samples), key=len))


@pytest.mark.full
def test_images_of_an_environment_are_shown_to_no_teacher(tmp_path):
    model, rows = written(tmp_path, "lfm2_vl")
    data = write_inputs(tmp_path, [{**rows[2], "number": 1}] * 4, reward=REWARD)
    words = {**ALBUM, "teacher": model, "max_steps": 1}
    with calling(ToolCall("turn")), pytest.raises(ConfigError, match="a teacher sees texts"):
        train(options_of(data, "run", **words))


@pytest.mark.full
@pytest.mark.parametrize("shown", ["Album", "Book"])
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "lfm2_vl"])
def test_steps_of_text_are_replayed_and_others_refused(
    model_type, shown, tmp_path, monkeypatch, capsys
):
    written(tmp_path, model_type)
    rows = [{"prompt": f"Look {i}.", "number": i} for i in range(4)]
    data = write_inputs(tmp_path, rows, reward=REWARD)
    words = {"environment": ALBUM["environment"].replace("Album", shown), "tool_parser": "hermes"}
    with calling(ToolCall("turn")):
        train(options_of(data, "run", **words, max_steps=1))
    monkeypatch.setattr(run_replay, "training_params", with_stops)
    capsys.readouterr()
    code, said = main(["replay", str(tmp_path / "run")]), capsys.readouterr()
    assert code == (ExitCode.OK if shown == "Book" else ExitCode.USAGE), said
    assert ("step 1 of " in said.err and "only steps of text" in said.err) == (shown == "Album")
    assert said.out.strip().endswith("equal to the run") == (shown == "Book")


@pytest.mark.full
def test_a_run_trains_on_what_an_agent_shows(tmp_path):
    output = train_here(tmp_path, save_rollouts=True, **AGENT)
    for step in lines(output / "metrics.jsonl"):
        assert step["logprob_diff_max/media"] < 1e-5
        assert step["agent/branches"] == 2
        assert step["agent/calls"] == 4
    assert len(lines(output / "metrics.jsonl")) == 2
    samples, rows = (lines(output / f"{name}.jsonl") for name in ("samples", "rollouts"))
    assert {len(sample["images"]) for sample in samples} <= {2, 4}
    assert sorted(len(row["media"]) for row in rows) == [2] * 16 + [4] * 16
    require_reported(output, [image for sample in samples for image in sample["images"]])
