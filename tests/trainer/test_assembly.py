"""Whole runs: the real strategies, the embedded engine, files on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError
from lightrft.strategy.config import ConfigError

REWARD = """
from pathlib import Path

FUSE = Path(__file__).with_name("fuse")


def score(prompts, responses, labels, **columns):
    assert len(columns["kind"]) == len(labels) == len(prompts)
    if FUSE.exists():
        left = int(FUSE.read_text())
        assert left > 0, "the fuse is blown"
        FUSE.write_text(str(left - 1))
    return [sum(ord(c) % 2 for c in r) / max(len(r), 1) for r in responses]
"""


def write_inputs(folder, num_prompts=12):
    rows = [
        {"prompt": f"say {'aeiou'[i % 5] * 3}", "answer": "aeiou"[i % 5], "kind": i}
        for i in range(num_prompts)
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:5]))
    (folder / "reward.py").write_text(REWARD)


def options(folder, model, **changes):
    values = {
        "pretrain": model,
        "prompt_data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        "input_key": "prompt",
        "label_key": "answer",
        "reward_fn": (f"{folder / 'reward.py'}:score",),
        "output_dir": str(folder / "run"),
        "fsdp": True,
        "bf16": False,
        "engine_type": "hf",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "generate_max_len": 8,
        "prompt_max_len": 32,
        "init_kl_coef": 0.05,
        "use_kl_loss": True,
        "loss_agg_mode": "token-mean",
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
    }
    return {**values, **changes}


def train_each(rank, world_size, runs):
    """One process of several runs, one after the other."""
    from dataclasses import asdict

    import torch.distributed as dist

    from lightrft.run.assembly import run_training

    if world_size > 1:
        # Kept over all runs: to end one and start the next at the same address is a race.
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return [asdict(run_training(TrainConfig(**values))) for values in runs]


@pytest.fixture
def only_process(monkeypatch):
    """The environment of a run with one process: this one."""
    from tests.ranks import find_free_port

    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(find_free_port())}.items():
        monkeypatch.setenv(name, value)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def timeless(metrics):
    return {n: v for n, v in metrics.items() if "second" not in n and not n.startswith("memory/")}


def test_layers_for_adapters_are_looked_for_before_weights_are_read(tmp_path, tiny_model):
    from lightrft.stages.policy.inputs import read_inputs

    write_inputs(tmp_path)
    wrong = options(tmp_path, tiny_model, lora_rank=4, target_modules=("foo",))
    with pytest.raises(ConfigError, match=r"no linear layer is called foo; the model has .*q_proj"):
        read_inputs(TrainConfig(**wrong))


@pytest.mark.full
@pytest.mark.usefixtures("only_process")
def test_a_run_leaves_its_files_and_a_broken_one_is_continued(tmp_path, tiny_model, capsys):
    write_inputs(tmp_path)
    values = options(tmp_path, tiny_model, save_steps=1, sample_steps=2)
    (whole,) = train_each(0, 1, [values])
    shown = capsys.readouterr().out
    rows = re.findall(r"sample of step (\d+): say \w+\n  reward (.*): .*\n  reward (.*):", shown)
    assert [row[0] for row in rows] == ["2"]
    assert float(rows[0][1]) >= float(rows[0][2])
    run = tmp_path / "run"
    assert whole["num_steps"] == 3
    assert {p.name for p in run.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "summary.json",
        "model",
    }
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 3
    assert whole["first_eval"]["eval/num_prompts"] == 5
    assert whole["last_metrics"]["policy_loss"] != 0
    assert [entry["step"] for entry in read(run / "metrics.jsonl")] == [0, 1, 2, 3]

    parts = options(tmp_path, tiny_model, save_steps=1, output_dir=str(tmp_path / "parts"))
    parts["heartbeat_seconds"] = 0.002
    # Checked at start, then a call a group: five of the evaluation, four of each of two steps.
    (tmp_path / "fuse").write_text("14")
    with pytest.raises(RewardError, match="fuse is blown"):
        train_each(0, 1, [parts])
    (tmp_path / "fuse").unlink()
    (rest,) = train_each(0, 1, [{**parts, "load_checkpoint": True}])
    assert rest["num_resumed_steps"] == 2
    assert timeless(rest["first_eval"]) == timeless(whole["first_eval"])
    # Signs of life name the step under way, also before the first of this process.
    _, shown = capsys.readouterr().out.split("continuing ", 1)
    alive = re.findall(r"still at step (\d+)/3", shown)
    assert set(alive) == {"3"}
    assert timeless(rest["last_metrics"]) == timeless(whole["last_metrics"])
    assert [entry["step"] for entry in read(tmp_path / "parts" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.usefixtures("only_process")
def test_two_processes_train_like_one(tmp_path, tiny_model):
    from tests.ranks import run_multiprocess

    write_inputs(tmp_path)
    names = ("group_norm", "gae")
    runs = [
        [
            options(
                tmp_path,
                tiny_model,
                advantage_estimator=name,
                output_dir=f"{tmp_path}/{name}{size}",
            )
            for name in names
        ]
        for size in (1, 2)
    ]
    alone = train_each(0, 1, runs[0])
    both = run_multiprocess(train_each, 2, timeout_seconds=240.0, args=(runs[1],))
    for index, name in enumerate(names):
        first, second = both[0][index], both[1][index]
        assert timeless(first["last_metrics"]) == timeless(second["last_metrics"])
        assert first["last_eval"]["eval/reward"] == alone[index]["last_eval"]["eval/reward"]
        for left, right in zip(
            read(tmp_path / f"{name}1" / "metrics.jsonl")[1:],
            read(tmp_path / f"{name}2" / "metrics.jsonl")[1:],
            strict=True,
        ):
            assert set(left) == set(right)
            assert left["policy_loss"] != 0
            for metric in set(timeless(left)) - {"engine_hash"}:
                assert right[metric] == pytest.approx(left[metric], rel=2e-3, abs=2e-5), metric


def test_what_a_user_got_wrong_is_said_before_anything_starts(tmp_path, tiny_model):
    from lightrft.datasets import DataError
    from lightrft.run.assembly import run_training

    write_inputs(tmp_path)
    for changes, error, message in (
        ({"pretrain": None}, ConfigError, "--pretrain"),
        ({"train_batch_size": 6}, ConfigError, "nearest legal"),
        ({"rollout_batch_size": 16, "train_batch_size": 16}, ConfigError, "12 usable prompts"),
        ({"reward_fn": ("boxed_mth",)}, ConfigError, "boxed_math"),
        ({"prompt_data": str(tmp_path / "absent.jsonl")}, DataError, "absent"),
    ):
        with pytest.raises(error, match=message):
            run_training(TrainConfig(**options(tmp_path, tiny_model, **changes)))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="another run"):
        run_training(TrainConfig(**options(tmp_path, tiny_model)))


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.usefixtures("only_process")
def test_deepspeed_and_fsdp_give_the_same_run(tmp_path, tiny_model):
    write_inputs(tmp_path)
    backends = {"fsdp": {}, "zero2": {"fsdp": False}, "zero3": {"fsdp": False, "zero_stage": 3}}
    runs = [
        options(
            tmp_path,
            tiny_model,
            advantage_estimator="gae",
            max_steps=2,
            output_dir=str(tmp_path / name),
            **changes,
        )
        for name, changes in backends.items()
    ]
    expected, *others = train_each(0, 1, runs)
    assert expected["last_metrics"]["policy_loss"] != 0
    for found in others:
        assert set(found["last_metrics"]) == set(expected["last_metrics"])
        for metric, value in timeless(expected["last_metrics"]).items():
            if metric != "engine_hash":
                assert found["last_metrics"][metric] == pytest.approx(value, rel=2e-3, abs=2e-5)
