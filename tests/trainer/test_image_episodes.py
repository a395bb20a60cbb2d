"""Whole runs on an environment and an agent that show images, in one process and on two ranks."""

import json
from pathlib import Path

import pytest
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.ranks import run_multiprocess
from tests.rollout.image_environments import squares
from tests.trainer.test_environment_run import REWARD, with_stops

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main
from lightrft.rollout import sampler as sampling
from lightrft.rollout.environments import specs
from lightrft.rollout.environments.call_formats import ToolCall

pytestmark = pytest.mark.shard("vision")

ROLLOUT = Path(__file__).parent.parent / "rollout"
ALBUM = ("--environment", f"{ROLLOUT / 'image_environments.py'}:Album")
AGENT = ("--agent", f"{ROLLOUT / 'agents' / 'image_agents.py'}:album")
COMPARED = ("reward", "policy_loss", "grad_norm", "entropy", "episode/turns", "response_length")


def write_rows(folder):
    """Eight rows, of which every other one has an image."""
    rows = []
    for i in range(8):
        row = {"input": f"Look {i}.", "number": i}
        if i % 2:
            squares(100 + i, (84, 56)).save(folder / f"{i}.png")
            row |= {"input": f"<image>Look {i}.", "images": [f"{i}.png"]}
        rows.append(json.dumps(row))
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def train(model, rows, output, plays, *words):
    """Two steps; random models seldom end a turn and write no calls: here all do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling, "training_params", with_stops)
        patched.setattr(specs, "choose_parser", lambda *given: lambda *turn: [ToolCall("turn")])
        return main(
            [
                "train",
                "--fsdp",
                "--pretrain",
                str(model),
                "--prompt_data",
                str(rows),
                "--apply_chat_template",
                "--system_prompt",
                "Turn the pages.",
                "--label_key",
                "number",
                "--reward_fn",
                f"{rows.parent / 'reward.py'}:score",
                "--engine_type",
                "hf",
                "--no_bf16",
                *plays,
                "--environment_workers",
                "1",
                "--max_turns",
                "3",
                "--rollout_batch_size",
                "4",
                "--n_samples_per_prompt",
                "2",
                "--train_batch_size",
                "8",
                "--micro_train_batch_size",
                "4",
                "--prompt_max_len",
                "200",
                "--generate_max_len",
                "16",
                "--actor_learning_rate",
                "1e-3",
                "--max_steps",
                "2",
                "--output_dir",
                str(output),
                *words,
            ]
        )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_a_run_shows_and_trains_the_images_of_all_turns(tmp_path, capsys):
    write_tiny_vision_model(tmp_path / "model", "tiny-qwen2.5-vl", seed=1)
    output = tmp_path / "out"
    assert train(tmp_path / "model", write_rows(tmp_path), output, ALBUM) == ExitCode.OK
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
    told = capsys.readouterr().err
    assert "only runs of models of text can be replayed" in told


@pytest.mark.full
def test_a_run_trains_on_what_an_agent_shows(tmp_path):
    write_tiny_vision_model(tmp_path / "model", "tiny-qwen2.5-vl", seed=1)
    output = tmp_path / "out"
    words = (AGENT, "--save_rollouts")
    assert train(tmp_path / "model", write_rows(tmp_path), output, *words) == ExitCode.OK
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


def train_rank(rank, world_size, *arguments):
    """One rank of a run."""

    return train(*arguments)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("preset", "plays"),
    [
        ("tiny-qwen2.5-vl", ALBUM),
        ("tiny-gemma3", ALBUM),
        ("tiny-smolvlm", ALBUM),
        ("tiny-llava-onevision", ALBUM),
        ("tiny-qwen2.5-vl", AGENT),
        ("tiny-smolvlm", AGENT),
    ],
)
def test_two_ranks_take_the_steps_of_one_process(preset, plays, tmp_path):
    """Packed, so that rows of several ranks lie in one stream, with their images delivered."""
    write_tiny_vision_model(tmp_path / "model", preset, seed=1)
    rows, found, ids = write_rows(tmp_path), {}, {}
    for world_size, more in ((1, ()), (2, ("--packing_samples",))):
        output = tmp_path / str(world_size)
        words = ("--prompt_max_len", "800", "--save_rollouts", *more)
        arguments = (tmp_path / "model", rows, output, plays, *words)
        run_multiprocess(train_rank, world_size, timeout_seconds=280, args=arguments)
        found[world_size] = lines(output / "metrics.jsonl")
        ids[world_size] = {
            (row["step"], row["sample_id"]): (row["response_ids"], row["media"])
            for row in lines(output / "rollouts.jsonl")
        }
    assert len(found[1]) == len(found[2]) == 2
    assert [*ids[1]] == [*ids[2]]
    first = {key for key in ids[1] if key[0] == 1}
    assert all(ids[1][key] == ids[2][key] for key in first)
    compared = [name for name in COMPARED if name in found[1][0]]
    for one, other in zip(found[1], found[2], strict=True):
        for name in compared:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
        assert other["logprob_diff_max/media"] < 1e-5
