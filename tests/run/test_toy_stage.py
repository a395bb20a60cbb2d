"""A stage that knows nothing of runs gets all of a run: see `toy_stage.py`."""

import hashlib
import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests import runs
from tests.ranks import run_multiprocess
from tests.runs import lines, steps

from lightrft.config import TrainConfig
from lightrft.run.assembly import run_training
from lightrft.stages.metrics import RunAlarmError
from lightrft.strategy.distributed.process_end import NonFiniteError, RunStoppedError
from lightrft.strategy.distributed.process_groups import start_process_group
from lightrft.tools.report.page import render_report

STAGE = str(Path(__file__).with_name("toy_stage.py")) + ":read_inputs"
BACKENDS = {"fake": {}, "fsdp": {"fsdp": True}}


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
    config = TrainConfig(**settings(folder, backend, **changes))
    return run_training(config, stage=STAGE, stop_request=stop_request)


def interrupted(folder, backend, step, **changes):
    """Ends a run in the update of a step; what it has written stays."""
    end = partial(train, folder, backend, **changes)
    runs.interrupted(lambda _: SimpleNamespace(train=end), None, step)


@contextmanager
def watched_optimizer():
    """Learning rate, moments and decay of each group in all steps of optimizers inside."""
    seen, original = [], torch.optim.AdamW.step

    def step(self, *arguments):
        names = ("lr", "betas", "weight_decay")
        seen.extend(tuple(group[name] for name in names) for group in self.param_groups)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", step)
        yield seen


def digest(folder):
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.full
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
    assert summary.verdict == "trained: 8 of 8 steps changed the weights"
    events = lines(parts / "events.jsonl")
    assert [event["event"] for event in events] == ["started", "resumed", "finished"]
    assert events[1]["restored"]["data"] == "pass 1, 12 of its points used"


def require_same_end(folder):
    """Check that the run in parts is the whole one."""
    assert steps(folder / "parts") == steps(folder / "whole")
    assert digest(folder / "parts/model") == digest(folder / "whole/model")


def in_ranks(rank, world_size, folder):
    start_process_group(None)
    train(folder / "whole", "fsdp")
    interrupted(folder / "parts", "fsdp", 5)
    return train(folder / "parts", "fsdp").num_resumed_steps


@pytest.mark.full
def test_two_ranks_train_what_one_does(tmp_path):
    assert run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(tmp_path,)) == [3, 3]
    require_same_end(tmp_path)


def test_a_request_stops_the_run_with_a_checkpoint(tmp_path):
    asked = iter([False] * 9 + [True])
    with pytest.raises(RunStoppedError, match="after step 4"):
        train(tmp_path / "a", "fake", stop_request=lambda: next(asked))
    assert train(tmp_path / "a", "fake").num_resumed_steps == 4
    train(tmp_path / "b", "fake")
    assert digest(tmp_path / "a/model") == digest(tmp_path / "b/model")


def test_an_alarm_ends_the_run(tmp_path):
    with pytest.raises(RunAlarmError, match=r"after step 1: .*learning rate was 0"):
        train(tmp_path, "fake", actor_learning_rate=0.0, stop_on_alarm=True)
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 1


def test_the_report_shows_the_run(tmp_path):
    train(tmp_path, "fake")
    page = render_report(tmp_path)
    assert "model_lr" in page
    assert "eval/fit" in page
    kept = load_file(tmp_path / "model/model.safetensors")
    true = torch.tensor([1.0, -2.0, 0.5])
    assert (kept["weight"][0] - true).norm() < 0.6 * true.norm()


def spoilt_and_healed(rank, world_size, folder, backend):
    """What a step without finite weights says, and the end of a run that went back before it."""
    if world_size > 1:
        start_process_group(None)
    train(folder / "whole", backend)
    interrupted(folder / "parts", backend, 4)
    with pytest.raises(NonFiniteError) as caught:
        train(folder / "parts", backend, l2=1e300, allow_changes=True)
    assert not (folder / "parts/model").exists()
    summary = train(folder / "parts", backend, allow_changes=True)
    return str(caught.value), summary.num_resumed_steps


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_finite_weights_is_not_kept_and_can_be_left_out(tmp_path, backend):
    num_ranks = {"fake": 1, "fsdp": 2}[backend]
    arguments = (tmp_path, backend)
    found = run_multiprocess(spoilt_and_healed, num_ranks, timeout_seconds=300, args=arguments)
    text = (
        "after step 4 weights are not finite: weight; nothing of this step was saved: continue "
        "from the checkpoint before it with --allow_changes and, say, a smaller learning rate"
    )
    assert found == [(text, 3)] * num_ranks
    require_same_end(tmp_path)


def test_a_continued_run_learns_with_the_options_of_its_command(tmp_path):
    interrupted(tmp_path, "fake", 4)
    with watched_optimizer() as seen:
        train(
            tmp_path,
            "fake",
            allow_changes=True,
            actor_learning_rate=0.05,
            adam_betas=(0.8, 0.99),
            l2=0.25,
        )
    rates = [step["model_lr"] for step in steps(tmp_path) if step["step"] > 0]
    factors = [1 / (1 + 0.1 * n) for n in range(8)]
    assert rates == pytest.approx(
        [(0.1 if n < 3 else 0.05) * factor for n, factor in enumerate(factors)]
    )
    assert {group[1:] for group in seen} == {((0.8, 0.99), 0.25), ((0.8, 0.99), 0.0)}


@pytest.mark.parametrize("after", [None, {"weight": 4.0, "bias": 0.5}])
def test_a_run_is_continued_with_other_factors_of_its_parts(tmp_path, after):
    interrupted(tmp_path, "fake", 4, learning_rate_factors={"weight": 0.5})
    with watched_optimizer() as seen:
        train(tmp_path, "fake", allow_changes=True, learning_rate_factors=after)
    rates = [0.1 / (1 + 0.1 * n) for n in range(8)]
    factors = (after or {"weight": 1.0, "bias": 1.0}).values()
    assert sorted(lr for lr, *_ in seen) == pytest.approx(
        sorted(r * f for r in rates[3:] for f in factors)
    )
    logged = [step["model_lr"] for step in steps(tmp_path) if step["step"] > 0]
    assert logged == pytest.approx(rates)
