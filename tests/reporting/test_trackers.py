"""Trackers: asked for, checked first, never the end of a run."""

import importlib.util
import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest

from lightrft.config import TrainConfig
from lightrft.reporting.trackers import build_trackers
from lightrft.reporting.trackers.best_effort import BestEffortLogger, TrackerError

pytestmark = pytest.mark.shard("trackers")

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


@pytest.mark.full
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
        output_dir=str(tmp_path),
        use_wandb="hunter2" * 6,
        seed=7,
        remote_rm_url="http://a:hunter2@h",
        wandb_org="org",
        wandb_group="group",
        wandb_project="lightrft_train_ppo",
        wandb_run_name="%H",
    )
    (tracker,) = build_trackers(config)
    tracker.log(1, METRICS)
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    config.save(tmp_path / "config.toml")
    assert "hunter2" not in (tmp_path / "config.toml").read_text()
    assert "hunter2" not in config.summary()

    def begin_another(**keywords):
        ids.append(keywords["id"])
        return SimpleNamespace(log=None, finish=None)

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


def needs(package):
    """Skips without the package, and does not import it: some read the environment then."""
    reason = f"{package} is not installed (scripts/trackers.txt)"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Opens a tracker twice, as a run that is continued; nothing may ask for an address."""

    def run(name, *extra):
        import socket

        asked = []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *to, **_: asked.append(to[:2]) or [])
        config = TrainConfig(
            output_dir=str(tmp_path / "run"),
            loggers=(name, *extra),
            seed=7,
            wandb_project="sums",
            remote_rm_url="http://a:hunter2@h",
        )
        for step in (1, 2):
            (tracker,) = build_trackers(config)
            tracker.log(step, {**METRICS, "reward": step / 2, "reward/<odd>": 1.0})
            tracker.close()
        assert asked == []
        kept = b"".join(
            path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
        )
        assert b"hunter2" not in kept
        return tmp_path / "run"

    return run


@needs("trackio")
def test_trackio_continues_its_run_in_the_folder_of_the_run(parts, monkeypatch, caplog, capsys):
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRACKIO_DIR")
    with caplog.at_level(logging.DEBUG):
        folder = parts("trackio")
    (database,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        rows = opened.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [(step, found["reward"]) for step, found in values] == [(1, 0.5), (2, 1.0)]
    assert "kl" not in values[0][1]
    assert len({name for name, *_ in rows}) == 1
    assert capsys.readouterr().out == ""
    assert any("trackio" in record.getMessage() for record in caplog.records)


@needs("mlflow")
def test_mlflow_continues_its_run_in_the_folder_of_the_run(parts, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = parts("mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["seed"] == "7"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.5), (2, 1.0)]
    assert {"eval/reward", "reward/_odd_"} < set(run.data.metrics)
    assert "kl" not in run.data.metrics


@needs("swanlab")
def test_swanlab_writes_the_parts_of_a_run_offline_under_one_id(parts, monkeypatch, capsys):
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    folder = parts("swanlab")
    files = list((folder / "swanlab").glob("run-*/*.swanlab"))
    assert files
    own_id = (folder / "swanlab_id").read_text().strip()
    assert {path.stem for path in files} == {f"run-{own_id}"}
    assert any(b"eval/reward" in path.read_bytes() for path in files)
    assert capsys.readouterr().out == ""


def test_the_extra_of_an_absent_tracker_is_named(tmp_path, monkeypatch):
    for module in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = TrainConfig(output_dir=str(tmp_path), use_tensorboard=str(tmp_path))
    with pytest.raises(TrackerError) as error:
        build_trackers(config)
    text = "--use_tensorboard: cannot be used: pip install 'lightrft[tensorboard]', or leave the "
    assert str(error.value) == text + "option out"


@pytest.mark.parametrize("name", ["trackio", "mlflow", "swanlab"])
def test_a_tracker_whose_package_is_absent_is_refused_with_its_option(name, tmp_path, monkeypatch):
    for module in {name, *(known for known in sys.modules if known.startswith(f"{name}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TrackerError, match=rf"--loggers {name}: cannot be used: .*{name}"):
        build_trackers(TrainConfig(output_dir=str(tmp_path), loggers=(name,)))
