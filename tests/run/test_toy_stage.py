"""A stage that knows nothing of runs gets all of a run: see `toy_stage.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_multiprocess

STAGE = str(Path(__file__).with_name("toy_stage.py")) + ":read_inputs"
BACKENDS = {"fake": {}, "fsdp": {"fsdp": True}}


class Interrupted(Exception):
    """The test ends a run here, in the middle of a step."""


def settings(folder, backend, **changes):
    return {
        "output_dir": str(folder),
        "seed": 5,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 1,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "actor_learning_rate": 0.1,
        "num_episodes": 2,
        "max_steps": 8,
        "save_steps": 3,
        "eval_steps": 2,
        "best_metric": "eval/fit",
        "num_threads": 1,
        **BACKENDS[backend],
        **changes,
    }


def train(folder, backend, *, stop_request=None, **changes):
    from lightrft.config import TrainConfig
    from lightrft.run.assembly import run_training

    config = TrainConfig(**settings(folder, backend, **changes))
    return run_training(config, stage=STAGE, stop_request=stop_request)


def interrupted(folder, backend, step):
    """Ends a run in the update of a step; what it has written stays."""
    from lightrft.run.loop import Loop

    original = Loop.update

    def update(self, batch, under_way):
        if under_way.number == step:
            raise Interrupted
        return original(self, batch, under_way)

    Loop.update = update
    try:
        train(folder, backend)
    except Interrupted:
        pass
    finally:
        Loop.update = original


def steps(folder):
    """Metrics of every step without what a clock says."""
    ignored = ("second", "memory/")
    return [
        {n: v for n, v in json.loads(line).items() if not any(word in n for word in ignored)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def digest(folder):
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupted_run_continues_to_the_bit(tmp_path, backend):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, backend)
    interrupted(parts, backend, 6)
    summary = train(parts, backend)
    assert (summary.num_resumed_steps, summary.num_steps) == (3, 8)
    assert steps(parts) == steps(whole)
    for name in ("model", "checkpoints/best"):
        assert digest(parts / name) == digest(whole / name)
    first, last = steps(whole)[1], steps(whole)[-1]
    assert last["loss"] < first["loss"]
    assert first["model_lr"] == 0.1
    assert first["grad_norm"] > 0
    assert "eval/fit" in last
    assert "eval/fit" not in first
    assert summary.verdict == "learned: 8 of 8 steps changed the weights"
    events = [json.loads(line) for line in (parts / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "resumed", "finished"]
    assert events[1]["restored"]["data"] == "pass 1, 12 of its points used"


def in_ranks(rank, world_size, folder):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    train(folder / "whole", "fsdp")
    interrupted(folder / "parts", "fsdp", 5)
    return train(folder / "parts", "fsdp").num_resumed_steps


def test_two_ranks_train_what_one_does(tmp_path):
    assert run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(tmp_path,)) == [3, 3]
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert digest(tmp_path / "parts/model") == digest(tmp_path / "whole/model")


def test_a_request_stops_the_run_with_a_checkpoint(tmp_path):
    from lightrft.strategy.distributed.process_end import RunStoppedError

    asked = iter([False] * 9 + [True])
    with pytest.raises(RunStoppedError, match="after step 4"):
        train(tmp_path / "a", "fake", stop_request=lambda: next(asked))
    assert train(tmp_path / "a", "fake").num_resumed_steps == 4
    train(tmp_path / "b", "fake")
    assert digest(tmp_path / "a/model") == digest(tmp_path / "b/model")


def test_an_alarm_ends_the_run(tmp_path):
    from lightrft.stages.metrics import RunAlarmError

    with pytest.raises(RunAlarmError, match=r"after step 1: .*learning rate was 0"):
        train(tmp_path, "fake", actor_learning_rate=0.0, stop_on_alarm=True)
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 1


def test_the_report_shows_the_run(tmp_path):
    from lightrft.tools.report.page import render_report

    train(tmp_path, "fake")
    page = render_report(tmp_path)
    assert "model_lr" in page
    assert "eval/fit" in page
    kept = load_file(tmp_path / "model" / "model.safetensors")
    true = torch.tensor([1.0, -2.0, 0.5])
    assert (kept["weight"][0] - true).norm() < 0.6 * true.norm()
