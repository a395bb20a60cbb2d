"""Steps of supervised fine-tuning are recomputed, and what is wrong with them is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig
from lightrft.datasets import chat_turns
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.rows import row_passes
from lightrft.stages.supervised import supervised_objective
from lightrft.strategy import optimizers
from lightrft.strategy.distributed import context
from lightrft.tools.audit.report import audit_step, verdict
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import SFTTrainer

WAYS = {
    "plain": {},
    "packed adapters": {"lora_rank": 4, "packing_samples": True},
    "mean of rows": {"sft_loss": "seq-mean-token-mean", "l2": 0.1},
    "dft": {"sft_loss": "dft"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


@pytest.fixture
def settings(model, tmp_path):
    """Options of two recorded steps on rows of very different lengths."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for n in range(8):
            asked = {"role": "user", "content": f"name {n}"}
            answer = {"role": "assistant", "content": "ab" * (1 + n * n)}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")
    return {
        "pretrain": model,
        "prompt_data": str(rows),
        "output_dir": str(tmp_path / "run"),
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "actor_learning_rate": 1e-3,
        "lr_warmup_ratio": 0.0,
        "audit_every": 1,
        "num_threads": 1,
    }


@pytest.fixture
def recorded(settings, tmp_path):
    """Trains two recorded steps, and audits the second."""

    def run(**changes):
        SFTTrainer(TrainConfig(**settings, **changes)).train()
        return audit_step(tmp_path / "run", 2)

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_recomputed_within_rounding(recorded, way):
    report = recorded(**WAYS[way])
    assert report.first_difference is None, verdict(report)
    found = {row.quantity: row for row in report.rows}
    for name in (
        "response mask",
        "ends of trained turns",
        "old logprobs",
        "logprobs, actor update 1",
        "denominator, actor update 1",
        "policy loss, actor update 1",
        "gradient norm, actor update 1",
        "learning rate, actor update 1",
        "actor weights after (change)",
    ):
        assert found[name].verdict == "equal", found[name]
    assert found["actor weights after (change)"].own > 0
    # As in the output of --json: no truth values among the numbers.
    assert not any(isinstance(each, bool) for row in report.rows for each in (row.run, row.own))


def test_the_options_of_the_run_count_and_not_those_of_the_record(recorded, tmp_path):
    assert recorded().first_difference is None
    path = tmp_path / "run" / "config.toml"
    path.write_text(
        path.read_text().replace("actor_learning_rate = 0.001", "actor_learning_rate = 0.002")
    )
    first = audit_step(tmp_path / "run", 2).first_difference
    assert first is not None
    assert "learning rate" in first.quantity


def count_of_one_rank(patch):
    reduce_over_data = context.DistributedContext.reduce_over_data
    patch.setattr(
        context.DistributedContext,
        "reduce_over_data",
        lambda self, value, *args: reduce_over_data(self, value, *args) / 2,
    )


def changed_masks(patch, change):
    pad = row_passes.pad

    def wrong(*args, **given):
        padded = pad(*args, **given)
        return replace(padded, is_trained=change(padded) & padded.attention_mask)

    patch.setattr(row_passes, "pad", wrong)


def mask_is_shifted(patch):
    changed_masks(patch, lambda padded: padded.is_trained.roll(-1, dims=1))


def end_of_turn_is_left_out(patch):
    changed_masks(patch, lambda padded: padded.is_trained & padded.is_trained.roll(-1, dims=1))


def end_of_turn_is_not_in_the_rows(patch):
    turns = chat_turns.ChatTurns.turns

    def wrong(*args, **kwargs):
        return [replace(x, token_ids=x.token_ids[:-1]) for x in turns(*args, **kwargs)]

    patch.setattr(chat_turns.ChatTurns, "turns", wrong)


def prompts_are_counted(patch):
    def count(mask, mode):
        return torch.tensor(float(mask.numel()), dtype=torch.float64)

    patch.setattr(supervised_objective, "local_normalizer", count)


def learning_rate_is_doubled(patch):
    read = optimizers.AdamSettings.read.__func__

    def doubled(cls, *args):
        found = read(cls, *args)
        return replace(found, lr=2 * found.lr)

    patch.setattr(optimizers.AdamSettings, "read", classmethod(doubled))


def prompts_are_trained(patch):
    pad = row_passes.pad

    def wrong(rows, *args, **given):
        first = np.ones_like(rows[0].is_trained)
        first[0] = False
        return pad([replace(rows[0], is_trained=first), *rows[1:]], *args, **given)

    patch.setattr(row_passes, "pad", wrong)


def rows_are_trained_twice(patch):
    patch.setattr(SupervisedRow, "rows", property(lambda row: (row, row)))


def in_ranks(rank, world_size, settings, counts_alone):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    if counts_alone:
        context.DistributedContext.reduce_over_data = lambda self, value, *args: value
    SFTTrainer(TrainConfig(**settings, fsdp=True)).train()


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("changes", "counts_alone"),
    [({}, False), ({"sp_size": 2, "sft_loss": "seq-mean-token-mean"}, False), ({}, True)],
)
def test_two_ranks_that_count_their_own_tokens_are_found(settings, tmp_path, changes, counts_alone):
    options = settings | changes
    run_multiprocess(in_ranks, 2, timeout_seconds=300, args=(options, counts_alone))
    first = audit_step(tmp_path / "run", 1).first_difference
    name = None if first is None else first.quantity
    assert name == ("denominator, actor update 1" if counts_alone else None)


FAULTS = {
    count_of_one_rank: "denominator, actor update 1",
    prompts_are_counted: "denominator, actor update 1",
    mask_is_shifted: "response mask",
    prompts_are_trained: "response mask",
    end_of_turn_is_left_out: "response mask",
    end_of_turn_is_not_in_the_rows: "ends of trained turns",
    learning_rate_is_doubled: "learning rate, actor update 1",
    rows_are_trained_twice: "rows of the step",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named(recorded, monkeypatch, fault):
    fault(monkeypatch)
    first = recorded().first_difference
    assert first is not None
    assert first.quantity == FAULTS[fault]
