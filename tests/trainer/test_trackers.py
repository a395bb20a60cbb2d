"""TensorBoard and W&B: asked for, checked first, never the end of a run."""

from __future__ import annotations

import logging
import math

import pytest

from lightrft.config import TrainConfig
from lightrft.trainer.reporting.trackers import BestEffortLogger, TrackerError, build_trackers

METRICS = {"reward": 0.5, "eval/reward": 0.25, "kl": math.nan}


class Failing:
    """A tracker that works once."""

    def __init__(self):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append(step)
        if step > 1:
            raise ConnectionError("the network is gone")

    def close(self):
        self.calls.append("close")


class Sink:
    """What a tracker's library gives, both kinds, recorded."""

    def __init__(self):
        self.got = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.got.append((tag, scalar_value, global_step))

    def log(self, data, step):
        self.got.append((data, step))

    def flush(self):
        self.got.append("flush")

    def close(self):
        self.got.append("close")

    finish = close


def test_nothing_is_tracked_unasked(tmp_path):
    assert build_trackers(TrainConfig(output_dir=str(tmp_path))) == []


def test_tensorboard_gets_every_finite_number(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = build_trackers(TrainConfig(output_dir=str(tmp_path), use_tensorboard=True))
    for step in (1, 2):
        tracker.log(step, {**METRICS, "reward": step / 2})
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()  # readable while the run goes on
    assert set(found.Tags()["scalars"]) == {"reward", "eval/reward"}
    assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    tracker.close()
    chosen = TrainConfig(output_dir=str(tmp_path), use_tensorboard=str(tmp_path / "elsewhere"))
    build_trackers(chosen)[0].close()
    assert any((tmp_path / "elsewhere").iterdir())


def test_wandb_gets_the_options_without_secrets_and_one_id_for_all_parts(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "")  # restored afterwards
    ids = []
    begin = wandb.init

    def remember(**keywords):
        assert "hunter2" not in str(keywords)
        assert keywords["config"]["seed"] == 7
        assert keywords["project"] == "lightrft_train_ppo"
        assert "%" not in keywords["name"]
        assert (keywords["entity"], keywords["group"]) == ("org", "group")
        ids.append(keywords["id"])
        return begin(**keywords)

    monkeypatch.setattr(wandb, "init", remember)
    config = TrainConfig(
        output_dir=str(tmp_path), use_wandb="hunter2" * 6, seed=7,
        remote_rm_url="http://a:hunter2@h", wandb_org="org", wandb_group="group",
        wandb_project="lightrft_train_ppo", wandb_run_name="%H",
    )  # fmt: skip
    (tracker,) = build_trackers(config)
    tracker.log(1, METRICS)
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    config.save(tmp_path / "config.toml")
    assert "hunter2" not in (tmp_path / "config.toml").read_text()
    assert "hunter2" not in config.summary()

    def begin_another(**keywords):
        ids.append(keywords["id"])
        return Sink()

    monkeypatch.setattr(wandb, "init", begin_another)
    build_trackers(config)
    assert len(ids) == 2
    assert len(set(ids)) == 1


def test_a_tracker_that_cannot_be_used_is_an_error_before_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")

    def refuse(**keywords):
        raise wandb.errors.CommError("no such project")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(TrackerError, match=r"--use_wandb: .*no such project.*leave the option out"):
        build_trackers(TrainConfig(output_dir=str(tmp_path), use_wandb=True))


def test_a_tracker_that_fails_later_is_told_once_and_left_out(caplog):
    inner = Failing()
    tracker = BestEffortLogger("use_wandb", inner.log, inner.close)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracker.log(step, METRICS)
        tracker.close()
    assert inner.calls == [1, 2]
    (record,) = caplog.records
    assert record.getMessage() == (
        "use_wandb failed and gets nothing more, the run goes on: the network is gone"
    )


def test_trackers_get_the_metrics_and_are_closed(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    board, run = Sink(), Sink()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setattr(tensorboard, "SummaryWriter", lambda _: board)
    config = TrainConfig(output_dir=str(tmp_path), use_wandb=True, use_tensorboard=True)
    for logger in build_trackers(config):
        logger.log(3, METRICS)
        logger.close()
    assert board.got == [("reward", 0.5, 3), ("eval/reward", 0.25, 3), "flush", "close"]
    assert run.got == [(METRICS, 3), "close"]
