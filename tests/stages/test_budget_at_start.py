"""The token budget of micro-batches at the start of each stage, on GPUs that are planted."""

import json
from dataclasses import replace

import pytest
import torch
from tests.runs import interrupted, rollout_options, row_options, tiny_models, write, write_inputs

from lightrft.cli.errors import MemoryExhaustedError
from lightrft.cli.train import lack_of_memory_explained
from lightrft.config import ConfigError, TrainConfig
from lightrft.run.assembly import run_training
from lightrft.tools.plan import start_check
from lightrft.tools.plan.memory import TOLERANCE, plan_memory, with_tokens
from lightrft.tools.plan.sizes import CONSTANTS, Constant
from lightrft.tools.report.page import run_facts
from lightrft.tools.report.run_data import read_run
from lightrft.trainer import SFTTrainer

STAGES = ("sft", "prefer", "reward", "divergence", "policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_models(tmp_path_factory.mktemp("budget"), "model", "teacher")
    rows = []
    for i in range(8):
        answer = "word " * (1 + i % 3)
        both = {"completion": answer, "chosen": answer, "rejected": f"no {answer}"}
        rows.append({"prompt": f"name {i}: ", **both})
    write(folder / "rows.jsonl", rows)
    return write_inputs(folder)


def settings(folder, stage, output, **changes):
    if stage == "policy":
        options = rollout_options(folder, output, train_batch_size=16, max_steps=1)
    else:
        options = row_options(folder / "model", folder / "rows.jsonl", output, max_row_tokens=64)
        options |= {"train_batch_size": 8, "fsdp": True, "bf16": False}
    if stage == "divergence":
        options |= {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    # The size of a micro-batch is for the start to decide.
    del options["micro_train_batch_size"]
    return TrainConfig(**{**options, "max_epochs": 1, "actor_learning_rate": 1e-3, **changes})


class Planted:
    """A device that the start finds; its memory is what the plan of so many tokens needs.

    Args:
        tokens: Budget that fits on it, and twice as many do not.
    """

    def __init__(self, monkeypatch, tokens):
        self.tokens, self.setups, self.original = tokens, [], start_check.settle
        monkeypatch.setattr(start_check, "device_bytes", lambda device: 1e15)
        monkeypatch.setattr(start_check, "settle", self.settle)

    def settle(self, setup, write, **options):
        need = plan_memory(with_tokens(setup, self.tokens)).worst.device_bytes
        setup = replace(setup, capacity_bytes=TOLERANCE * need / 0.95 * (1 + 1e-7))
        self.setups.append(setup)
        return self.original(setup, write, **options)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_takes_the_largest_power_of_two_that_fits_and_records_it(
    tmp_path, folder, monkeypatch, capsys, stage
):
    by_rows = run_training(settings(folder, stage, tmp_path / "rows"), stage=stage)
    assert "micro_batch_tokens" not in capsys.readouterr().out
    planted = Planted(monkeypatch, 128)
    summary = run_training(settings(folder, stage, tmp_path / "run"), stage=stage)
    said = [x for x in capsys.readouterr().out.splitlines() if "micro_batch_tokens = 128: " in x]
    assert len(said) == 1
    assert "the peak of train is planned at" in said[0]
    twice = plan_memory(with_tokens(planted.setups[0], 256))
    assert not twice.passes_fit

    assert TrainConfig.load(tmp_path / "run/config.toml").micro_batch_tokens == 128
    start = json.loads((tmp_path / "run/run.json").read_text())
    assert start["decided"]["micro_batch_tokens"] is None
    peaks = json.loads((tmp_path / "run/summary.json").read_text())["memory"]
    assert peaks["train"]["planned_bytes"] == start["planned_bytes"]["train"] > 0
    assert peaks["train"]["measured_bytes"] > 0
    assert summary.memory == peaks
    facts = dict(run_facts(read_run(tmp_path / "run")))
    assert "train: planned " in facts["memory at the peak"]
    assert ", measured " in facts["memory at the peak"]

    # The step is that of micro-batches of one row.
    for name in ("loss", "grad_norm", "policy_loss", "kd_loss"):
        if name in by_rows.last_metrics:
            wanted = pytest.approx(by_rows.last_metrics[name], rel=1e-4, abs=1e-6)
            assert summary.last_metrics[name] == wanted


GIVEN = (
    {"micro_batch_tokens": 64},
    {"micro_train_batch_size": 2},
    {"micro_train_batch_size": 1},
    {"micro_rollout_batch_size": 2},
)


@pytest.mark.parametrize("sizes", GIVEN)
def test_a_size_that_was_given_is_never_replaced_also_where_it_is_the_default(
    tmp_path, folder, monkeypatch, sizes
):
    Planted(monkeypatch, 128)
    config = settings(folder, "sft", tmp_path).replaced(sizes)
    interrupted(SFTTrainer, config, 1)
    kept = TrainConfig.load(tmp_path / "config.toml")
    assert kept.micro_batch_tokens == sizes.get("micro_batch_tokens")


@pytest.mark.full
def test_a_continued_run_keeps_its_budget_and_another_one_is_refused(
    tmp_path, folder, monkeypatch, capsys
):
    config = settings(folder, "sft", tmp_path, save_steps=1, max_epochs=2)
    Planted(monkeypatch, 128)
    interrupted(SFTTrainer, config, 2)
    with pytest.raises(ConfigError, match="micro_batch_tokens: 128 -> 64"):
        SFTTrainer(config.replaced({"micro_batch_tokens": 64})).train()
    # A device on which more would fit.
    Planted(monkeypatch, 1024)
    capsys.readouterr()
    summary = SFTTrainer(config).train()
    assert summary.num_resumed_steps == 1
    assert "micro_batch_tokens = " not in capsys.readouterr().out
    assert TrainConfig.load(tmp_path / "config.toml").micro_batch_tokens == 128


@pytest.mark.full
def test_a_run_that_counted_rows_goes_on_counting_rows(tmp_path, folder, monkeypatch):
    config = settings(folder, "sft", tmp_path, save_steps=1, max_epochs=2)
    interrupted(SFTTrainer, config, 2)
    Planted(monkeypatch, 128)
    SFTTrainer(config).train()
    assert TrainConfig.load(tmp_path / "config.toml").micro_batch_tokens is None


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_budget_that_cannot_fit_is_refused_at_the_start_of_every_stage(
    tmp_path, folder, monkeypatch, stage
):
    # Else the context of CUDA is larger than all of a tiny model.
    monkeypatch.setitem(CONSTANTS, "context_gb", Constant(0.0, "none"))
    Planted(monkeypatch, 128)
    config = settings(folder, stage, tmp_path, micro_batch_tokens=2**20)
    if stage != "policy":
        rows = (folder / "rows.jsonl").read_text()
        (tmp_path / "many.jsonl").write_text(rows * 64)
        config = config.replaced(
            {"prompt_data": str(tmp_path / "many.jsonl"), "train_batch_size": 512}
        )
    with pytest.raises(MemoryError, match=r"feasible settings: .*--micro_batch_tokens \d+"):
        run_training(config, stage=stage)


def test_a_budget_that_was_planned_too_large_ends_in_one_line_with_all_numbers(
    tmp_path, folder, monkeypatch
):
    Planted(monkeypatch, 128)

    def without_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("lightrft.stages.rows.row_stage.optimizer_step", without_memory)
    config = settings(folder, "sft", tmp_path)
    with pytest.raises(MemoryExhaustedError) as caught, lack_of_memory_explained(config):
        SFTTrainer(config).train()
    line = str(caught.value).splitlines()[0]
    assert "in phase 'train': CUDA out of memory" in line
    planned = json.loads((tmp_path / "run.json").read_text())["planned_bytes"]["train"]
    assert f"planned {planned / 1e9:.3g} GB, measured " in line
    assert "micro_batch_tokens = 128: give --micro_batch_tokens 64" in line
