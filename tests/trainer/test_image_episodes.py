"""Whole runs on an environment and an agent that show images, in one process and on two ranks."""

from pathlib import Path

import pytest
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.rollout.image_environments import squares
from tests.runs import calling, lines, rollout_options, train, write_inputs
from tests.trainer.test_environment_run import REWARD

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.rollout.environments.calls import ToolCall

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


@pytest.mark.full
def test_a_run_shows_and_trains_the_images_of_all_turns(tmp_path, capsys):
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
    assert main(["report", str(output)]) == ExitCode.OK
    page = (output / "report.html").read_text()
    assert all(image in page for image in max((s["images"] for s in samples), key=len))
    capsys.readouterr()
    assert main(["replay", str(output)]) == ExitCode.USAGE
    assert "only runs of models of text can be replayed" in capsys.readouterr().err


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
    assert main(["report", str(output)]) == ExitCode.OK
    page = (output / "report.html").read_text()
    assert all(image in page for sample in samples for image in sample["images"])
