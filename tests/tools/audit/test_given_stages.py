"""Steps of stages that learn from rows are recomputed within rounding; faults are named."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.faults import becomes, calls, fields, results, takes
from tests.ranks import run_multiprocess
from tests.runs import row_options, tiny_models, train, train_each, write

from lightrft.algorithms.preference_losses import AnswerSums
from lightrft.datasets import chat_turns
from lightrft.models import head, lora, reward_model
from lightrft.stages.distillation import divergence_inputs, divergence_stage
from lightrft.stages.preference import preference_stage
from lightrft.stages.preference.preference_objective import StepCounts
from lightrft.stages.reward import comparisons, reward_stage
from lightrft.stages.supervised import supervised_stage
from lightrft.strategy import optimizers, strategy_base
from lightrft.tools.audit.preference_losses import PREFERENCE_LOSSES
from lightrft.tools.audit.report import audit_step, verdict

pytestmark = pytest.mark.shard("audit")
slow = pytest.mark.slow

LENGTHS = (1, 4, 2, 30, 3, 9, 1, 14)
ROWS = {
    "turns": lambda n, size: {
        "messages": [
            {"role": "user", "content": f"name {n}"},
            {"role": "assistant", "content": "ab" * size},
        ],
    },
    "pairs": lambda n, size: {"chosen": "ab" * size, "rejected": f"no {n}", "margin": 0.2 * n},
    "labels": lambda n, size: {"completion": "ab" * size, "label": n % 3 == 0},
    "rankings": lambda n, size: {
        "answers": ["ab" * size, f"no {n}", "so", "c"][: 2 + n % 3],
        "ranks": [1, 2, 2, 1][: 2 + n % 3],
    },
    "scores": lambda n, size: {
        "prompt_ids": [5, 6 + n],
        "response_ids": [7] * size,
        "score": n / 3,
    },
    "steps": lambda n, size: {
        "completions": [f"step {i}" for i in range(1 + size % 5)],
        "labels": [(n + i) % 2 == 0 for i in range(1 + size % 5)],
    },
    "rows": lambda _, size: {"completion": "ab" * size},
}
STAGES = {"sft": "turns", "prefer": "pairs", "reward": "pairs", "divergence": "rows"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and rows of very different lengths."""
    path = tiny_models(tmp_path_factory.mktemp("given"), "model", "teacher")
    for kind, row in ROWS.items():
        prompts = [{} if kind == "turns" else {"prompt": f"name {n}: "} for n in range(8)]
        rows = [prompts[n] | row(n, size) for n, size in enumerate(LENGTHS)]
        write(path / f"{kind}.jsonl", rows)
    return path


def options(folder, stage, run, *, data=None, **changes):
    """Return options of two recorded steps."""
    of_teacher = {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    return row_options(folder / "model", folder / f"{data or STAGES[stage]}.jsonl", run) | {
        "stage": stage,
        "max_epochs": 1,
        "actor_learning_rate": 1e-3 if stage == "sft" else 2e-4,
        "lr_warmup_ratio": 0.0,
        "lr_scheduler": "linear",
        "audit_every": 1,
        **(of_teacher if stage == "divergence" else {}),
        **changes,
    }


@pytest.fixture
def recorded(folder, tmp_path):
    """Train two recorded steps, and audit the second."""

    def run(stage, **changes):
        train(options(folder, stage, tmp_path / "run", **changes))
        return audit_step(tmp_path / "run", 2)

    return run


ADAPTERS = {"lora_rank": 4, "packing_samples": True}
WAYS = {
    "sft": ("sft", {}),
    "sft, adapters, packed": ("sft", ADAPTERS),
    "sft, mean of rows": ("sft", {"sft_loss": "seq-mean-token-mean", "l2": 0.1}),
    "dft": ("sft", {"sft_loss": "dft"}),
    "every loss of pairs": (
        "prefer",
        {
            "preference_loss": tuple(PREFERENCE_LOSSES),
            "preference_weights": tuple(0.1 * (1 + n % 4) for n in range(len(PREFERENCE_LOSSES))),
        },
    ),
    "pairs with margins": ("reward", {"centering_coef": 0.05}),
    "steps": ("reward", {"data": "steps"}),
    "jsd, packed": (
        "divergence",
        {"teacher_form": "jsd", "teacher_beta": 0.3, "packing_samples": True},
    ),
}
SLOW_WAYS = {
    "dpo": ("prefer", {}),
    "adapters, packed": ("prefer", ADAPTERS),
    "labelled answers": ("prefer", {"data": "labels", "preference_loss": ("kto",), "l2": 0.1}),
    "hps, adapters, packed": ("reward", {"reward_loss": "hps", **ADAPTERS}),
    "rankings with ties": ("reward", {"data": "rankings", "reward_loss": "rao_kupper"}),
    "labels": ("reward", {"data": "labels", "micro_batch_tokens": 128}),
    "scores": ("reward", {"data": "scores", "reward_loss": "mse"}),
    "forward": ("divergence", {}),
    "reverse, adapters": ("divergence", {"teacher_form": "reverse", "lora_rank": 4}),
}


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=slow) for way in SLOW_WAYS)])
def test_a_step_is_recomputed_within_rounding(recorded, tmp_path, way):
    stage, changes = (WAYS | SLOW_WAYS)[way]
    report = recorded(stage, **changes)
    assert report.first_difference is None, verdict(report)
    rows = {row.quantity: row for row in report.rows}
    for name in (
        "response mask",
        "denominator, actor update 1",
        "policy loss, actor update 1",
        "gradient norm, actor update 1",
        "learning rate, actor update 1",
        "states before, actor",
        "actor weights after (change)",
        *(("ends of trained turns", "old logprobs") if stage == "sft" else ()),
    ):
        assert rows[name].verdict == "equal", rows[name]
    assert rows["actor weights after (change)"].own > 0
    first = audit_step(tmp_path / "run", 1)
    assert first.first_difference is None, verdict(first)


@pytest.mark.full
def test_a_teacher_that_is_the_student_raises_no_alarm(recorded, folder):
    """Loss and gradient are rounding alone."""
    report = recorded("divergence", teacher=str(folder / "model"), teacher_form="jsd")
    assert report.first_difference is None, verdict(report)


@slow
@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_raises_no_alarm(recorded, stage):
    report = recorded(stage, bf16=True, fsdp=True)
    assert report.first_difference is None, verdict(report)


OWN_LOSSES = {
    "prefer": (
        "from lightrft.algorithms.interface import preference_loss\n"
        "@preference_loss()\ndef own(sums):\n    return -sums.gaps\n"
    ),
    "reward": "def own(differences, is_tie):\n    return -differences\n",
}


@pytest.mark.parametrize("stage", OWN_LOSSES)
def test_a_loss_of_ones_own_ends_the_audit_of_the_update(recorded, tmp_path, stage):
    (tmp_path / "own.py").write_text(OWN_LOSSES[stage])
    text = f"{tmp_path / 'own.py'}:own"
    loss = {"preference_loss": (text,)} if stage == "prefer" else {"reward_loss": text}
    report = recorded(stage, **loss)
    assert report.first_difference is None, verdict(report)
    (row,) = [row for row in report.rows if row.quantity == "actor weights after"]
    assert (row.verdict, "caller's own" in row.note) == ("not audited", True)


def test_the_options_of_the_run_count_and_not_those_of_the_record(recorded, tmp_path):
    assert recorded("sft").first_difference is None
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.001", "learning_rate = 0.002"))
    assert "learning rate" in audit_step(tmp_path / "run", 2).first_difference.quantity


# --- faults


def end_left_out(padded):
    return replace(padded, is_trained=padded.is_trained & padded.is_trained.roll(-1, dims=1))


def first_prompt_trained(original, rows, *args, **kwargs):
    first = np.ones_like(rows[0].is_trained)
    first[0] = False
    return original([replace(rows[0], is_trained=first), *rows[1:]], *args, **kwargs)


def without_ends(turns):
    return [replace(turn, token_ids=turn.token_ids[:-1]) for turn in turns]


def all_counted(original, mask, mode):
    return torch.tensor(float(mask.numel()), dtype=torch.float64)


def rows_counted(original, mask, mode):
    return torch.tensor(float(len(mask)), dtype=torch.float64)


def swapped(sums):
    return replace(sums, chosen=sums.rejected, rejected=sums.chosen)


def of_the_trained_model(original, self, model, *args):
    return original(self, self.models.main.model, *args)


def another_beta(original, config):
    return original(config.replaced({"preference_args": {"beta": 0.12}}))


def without_centring(original, self, *args):
    config, self.config = self.config, self.config.replaced({"centering_coef": 0.0})
    try:
        return original(self, *args)
    finally:
        self.config = config


def at_padding(original, self, token_ids, attention_mask, **kwargs):
    return original(self, token_ids, torch.ones_like(attention_mask), **kwargs)


def scores_at_padding(patch):
    calls(reward_model.RewardModel, "forward", at_padding)(patch)
    # The proof at the start would name it.
    patch.setattr("lightrft.stages.reward.reward_inputs.prove_pooling", lambda *_: 1.0)


def of_the_student(original, self, config, strategy):
    return original(self, config.replaced({"teacher": config.pretrain}), strategy)


def misses_a_step_of_its_schedule(patch):
    calls_before = itertools.count()
    # The first call is that of the constructor.
    calls(
        optimizers.PlannedLR,
        "step",
        lambda original, *args: None if next(calls_before) == 1 else original(*args),
    )(patch)


def differs(**changes):
    """Plant a change of the comparisons of answers."""
    return results(comparisons.Comparisons, "of", fields(**changes))


def diverges(change):
    """Plant another divergence: a function of the right one and its arguments."""
    return calls(divergence_stage, "divergence", change)


LOSS, SCORES = "policy loss, actor update 1", "scores, actor update 1"
DENOMINATOR, REFERENCE = "denominator, actor update 1", "sums of the reference"
ONE_RANK = property(lambda self: StepCounts(len(self.items) // 2, len(self.items)))
# What the audit names first, the stage, what plants the fault, and options of the run.
FAULTS = {
    "prompts are counted": (
        DENOMINATOR,
        "sft",
        calls(supervised_stage, "local_normalizer", all_counted),
        {},
    ),
    "a prompt is trained": (
        "response mask",
        "sft",
        calls(supervised_stage, "pad", first_prompt_trained),
        {},
    ),
    "the end of a turn is left out": (
        "response mask",
        "sft",
        results(supervised_stage, "pad", end_left_out),
        {},
    ),
    "the end of a turn is not in the rows": (
        "ends of trained turns",
        "sft",
        results(chat_turns.ChatTurns, "turns", without_ends),
        {},
    ),
    "chosen and rejected are swapped": (
        LOSS,
        "prefer",
        results(preference_stage.PreferenceBatch, "sums", swapped),
        {},
    ),
    "the reference is the trained model": (
        REFERENCE,
        "prefer",
        calls(preference_stage.PreferenceStage, "_score_rows", of_the_trained_model),
        {},
    ),
    "beta is another": (
        LOSS,
        "prefer",
        calls(preference_stage, "build_objective", another_beta),
        {},
    ),
    "answers lose their end": (
        "response mask",
        "prefer",
        results(preference_stage, "pad", end_left_out),
        {},
    ),
    "the margin is left out": (LOSS, "reward", differs(margins=torch.zeros_like), {}),
    "centring is left out": (
        LOSS,
        "reward",
        calls(reward_stage.RewardStage, "sum_of_losses", without_centring),
        {"centering_coef": 0.05},
    ),
    "scores are read at padding": (SCORES, "reward", scores_at_padding, {}),
    "steps are counted by row": (
        DENOMINATOR,
        "reward",
        becomes(reward_stage, "count_losses", lambda judgements, name: len(judgements)),
        {"data": "steps"},
    ),
    "the divergence is that of the other direction": (
        LOSS,
        "divergence",
        diverges(lambda o, student, teacher, **_: o(student, teacher, form="reverse")),
        {},
    ),
    "the teacher has a temperature": (
        LOSS,
        "divergence",
        diverges(lambda o, student, teacher, **k: o(student, teacher / 1.02, **k)),
        {},
    ),
    "prefer misses a step of its schedule": (
        "schedule position, actor",
        "prefer",
        misses_a_step_of_its_schedule,
        {},
    ),
}
# These take minutes together.
SLOW_FAULTS = {
    "pairs of one rank are counted": (
        LOSS,
        "prefer",
        becomes(preference_stage.PreferencePart, "counts", ONE_RANK),
        {},
    ),
    "the length does not normalise": (
        LOSS,
        "prefer",
        becomes(AnswerSums, "mean_logprobs", property(lambda self: self.logprobs / 8)),
        {"preference_loss": ("simpo",)},
    ),
    "adapters stay on for the reference": (
        REFERENCE,
        "prefer",
        becomes(lora.LoraModel, "adapters_off", lambda self: contextlib.nullcontext()),
        {"lora_rank": 4},
    ),
    "the KL is that of the own prompt": (
        "log-ratio behind other prompts, actor update 1",
        "prefer",
        becomes(preference_stage, "other_answers", lambda items, place: items[place].rows),
        {"preference_loss": ("kto",)},
    ),
    "the SFT term is a mean of rows": (
        LOSS,
        "prefer",
        becomes(preference_stage, "tokens_per_chosen", lambda items: 8.0),
        {"preference_loss": ("dpo", "sft")},
    ),
    "logits of preferences have a temperature": (
        "logprobs, actor update 1",
        "prefer",
        takes(head.LinearLogprobHead, "forward", temperature=1.02),
        {},
    ),
    "the head computes in bfloat16": (
        SCORES,
        "reward",
        results(reward_model.ScoreHead, "forward", lambda scores: scores.bfloat16().float()),
        {},
    ),
    "every pair of a ranking weighs 1": (
        LOSS,
        "reward",
        differs(weights=torch.ones_like),
        {"data": "rankings"},
    ),
    "ties are preferences": (
        LOSS,
        "reward",
        differs(is_tie=torch.zeros_like),
        {"data": "rankings"},
    ),
    "the mixture weighs the student": (
        LOSS,
        "divergence",
        diverges(lambda o, *a, form, beta: o(*a, form=form, beta=1 - beta)),
        {"teacher_form": "jsd", "teacher_beta": 0.3},
    ),
    "the teacher is another": (
        LOSS,
        "divergence",
        calls(divergence_inputs.DivergenceInputs, "build", of_the_student),
        {},
    ),
    "rows are counted instead of tokens": (
        DENOMINATOR,
        "divergence",
        calls(supervised_stage, "local_normalizer", rows_counted),
        {},
    ),
    **{
        f"{stage} halves gradients": (
            "gradient norm, actor update 1",
            stage,
            calls(
                strategy_base.StrategyBase, "backward", lambda o, self, x, *a: o(self, x / 2, *a)
            ),
            {},
        )
        for stage in STAGES
    },
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(x, marks=slow) for x in SLOW_FAULTS)])
def test_a_planted_fault_is_named(recorded, monkeypatch, name):
    first, stage, plant, changes = (FAULTS | SLOW_FAULTS)[name]
    plant(monkeypatch)
    report = recorded(stage, **changes)
    assert report.first_difference is not None
    assert report.first_difference.quantity == first, verdict(report)


def in_ranks(rank, world_size, runs, counted_alone):
    if counted_alone == "tokens":
        strategy_base.StrategyBase.reduce_over_data = lambda self, value, *args: value
    if counted_alone == "pairs":
        preference_stage.PreferencePart.counts = property(
            lambda self: StepCounts(len(self.places), len(self.places))
        )
    train_each(rank, world_size, runs)


def firsts_of_two_ranks(folder, tmp_path, runs, counted_alone=None):
    """Return what the audit names first in each run of two ranks."""
    given = [
        options(folder, name.split(",")[0], tmp_path / name, fsdp=True, **changes)
        for name, changes in runs.items()
    ]
    run_multiprocess(in_ranks, 2, timeout_seconds=400, args=(given, counted_alone))
    firsts = (audit_step(tmp_path / name, 1).first_difference for name in runs)
    return [first and first.quantity for first in firsts]


@pytest.mark.full
@pytest.mark.multiprocess
def test_two_ranks_are_sound_and_tokens_that_each_counts_alone_are_named(folder, tmp_path):
    runs = {"sft": {}, "sft, parts": {"sp_size": 2, "sft_loss": "seq-mean-token-mean"}}
    assert firsts_of_two_ranks(folder, tmp_path, runs) == [None, None]
    runs = {"sft, alone": {}}
    assert firsts_of_two_ranks(folder, tmp_path, runs, "tokens") == [DENOMINATOR]


@slow
@pytest.mark.multiprocess
def test_two_ranks_of_other_stages_are_sound_and_a_mean_of_each_is_named(folder, tmp_path):
    runs = {
        "prefer": {"preference_loss": ("dpo", "aot", "kto")},
        "reward": {"data": "rankings", "micro_train_batch_size": 1},
        "divergence": {"sp_size": 2},
    }
    assert firsts_of_two_ranks(folder, tmp_path, runs) == [None] * 3
    runs = {"prefer, alone": {}}
    assert firsts_of_two_ranks(folder, tmp_path, runs, "pairs") == [LOSS]
