"""Whole runs of distillation: what a teacher moves, and what it must be."""

import json
import math
import shutil

import pytest
from tests.runs import steps, write
from tests.stages.distillation.distillation_world import SAMPLED, options, run, write_rows

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.types import DataError
from lightrft.stages.parity_limits import ParityError
from lightrft.stages.teachers import is_own_teacher, require_zero
from lightrft.strategy import get_fake_strategy
from lightrft.tools.rows import row_file


@pytest.mark.full
def test_the_student_moves_to_the_teacher(tmp_path, models):
    write_rows(tmp_path)
    many = {"n_samples_per_prompt": 16, "generate_max_len": 3, "num_episodes": 40}
    many |= {
        "rollout_batch_size": 8,
        "train_batch_size": 128,
        "micro_train_batch_size": 128,
        "lr_scheduler": "linear",
    }
    many |= {"micro_rollout_batch_size": 128, "actor_learning_rate": 3e-3}
    summary = run(models, tmp_path, **many)
    assert summary.verdict.startswith("trained: 40 of 40")
    assert summary.alarms == ()
    distances = [step["teacher_kl"] for step in steps(tmp_path / "run")]
    assert sum(distances[-5:]) < 0.6 * sum(distances[:5])


@pytest.mark.full
@pytest.mark.parametrize("rewards", [(), ("gsm8k",)])
def test_a_run_without_rewards_shows_none(tmp_path, models, capsys, rewards):
    """A reward of 0 that nobody measured is no reward; with one that is measured it is shown."""
    write_rows(tmp_path, label=["#### 2"] * 8)
    held_out = write(tmp_path / "held_out.jsonl", [{"input": "say z", "label": "#### 2"}])
    changes = {**SAMPLED, "save_rollouts": True, "save_trajectories": True}
    changes["eval_data"] = held_out
    summary = run(models, tmp_path, **changes, reward_fn=rewards)
    entries = steps(tmp_path / "run")
    shown = {name for entry in entries for name in entry if "reward" in name}
    samples, rollouts, trajectories = (
        json.loads((tmp_path / f"run/{each}.jsonl").read_text().splitlines()[0])
        for each in ("samples", "rollouts", "trajectories")
    )
    console = capsys.readouterr().out
    if rewards:  # the control
        assert {"reward", "eval/reward"} <= shown
        assert samples["reward"] == trajectories["reward"] == rollouts["reward"] == 0.0
        return
    assert shown == set()
    assert not any("constant_group_share" in entry for entry in entries)
    assert "reward" not in {*samples, *trajectories}
    assert rollouts["reward"] is rollouts["accuracy"] is None
    assert "teacher KL" in console
    assert "reward" not in summary.verdict
    request = row_file.RowRequest(
        tmp_path / "run", "sft", "right", threshold=1.0, max_per_prompt=None
    )
    with pytest.raises(DataError, match="the run measured no rewards, and rows are chosen"):
        row_file.write_rows(request, tmp_path / "chosen.jsonl")


@pytest.mark.parametrize("form", ["sampled", "reverse", "forward", "jsd"])
def test_a_teacher_equal_to_the_student_gives_0(tmp_path, models, form):
    write_rows(tmp_path)
    is_sampled = form == "sampled"
    same = {**(SAMPLED if is_sampled else {"max_steps": 1}), "teacher_form": form}
    metrics = run(models, tmp_path, teacher=str(models / "student"), **same).last_metrics
    assert abs(metrics["teacher_kl" if is_sampled else "loss"]) < 1e-6
    assert metrics["advantage_abs" if is_sampled else "grad_norm"] < 1e-4
    assert "teacher = student gives 0" in (tmp_path / "run/logs/rank_0.log").read_text()


def test_a_model_that_differs_from_itself_is_named(models, tmp_path):
    same = {"teacher": str(models / "student"), "teacher_form": "forward"}
    config = TrainConfig(**options(models, tmp_path, **same))
    rounded = config.replaced({"lora_rank": 2, "quantize": "nf4"})
    assert is_own_teacher(config) > is_own_teacher(rounded)
    with get_fake_strategy(config) as strategy:
        require_zero(1e-6, config, strategy.context)
        for mean in (1e-2, math.nan):
            with pytest.raises(ParityError, match="student and teacher are one model"):
                require_zero(mean, config, strategy.context)


def with_two_tokens_exchanged(folder, models):
    shutil.copytree(models / "teacher", folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(n for n, i in vocab.items() if i == k) for k in (70, 90))
    vocab[first], vocab[second] = 90, 70
    path.write_text(json.dumps(content))
    return first, second


def test_another_tokenizer_is_refused_with_the_first_differing_id(tmp_path, models):
    first, second = with_two_tokens_exchanged(tmp_path / "other", models)
    write_rows(tmp_path)
    with pytest.raises(ConfigError, match=f"token 70 is '{first}' in .* and '{second}' in"):
        run(models, tmp_path, teacher=str(tmp_path / "other"), **SAMPLED)
    assert not (tmp_path / "run").exists()
