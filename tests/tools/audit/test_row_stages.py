"""Steps of the stages that train on rows are recomputed; faults are named."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from tests.ranks import run_multiprocess
from tests.runs import interrupted
from tests.tools.audit.faults import calls, fields, instead, results
from transformers import GraniteConfig, GraniteForCausalLM

from lightrft.algorithms.preference_losses import AnswerSums
from lightrft.config import TrainConfig
from lightrft.datasets import chat_turns
from lightrft.datasets.row_data import SupervisedRow
from lightrft.models import head, lora, reward_model
from lightrft.stages.distillation import divergence_inputs, divergence_objective
from lightrft.stages.preference import preference_inputs, preference_objective
from lightrft.stages.reward import comparisons, reward_objective
from lightrft.stages.rows import row_passes, row_stage
from lightrft.stages.supervised import supervised_objective
from lightrft.strategy import model_training, optimizers
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.tools.audit.preference_losses import PREFERENCE_LOSSES
from lightrft.tools.audit.report import audit_step, verdict
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer, PreferenceTrainer, RewardTrainer, SFTTrainer

pytestmark = pytest.mark.shard("audit")
slow = pytest.mark.slow

TRAINERS = {
    "sft": SFTTrainer,
    "prefer": PreferenceTrainer,
    "reward": RewardTrainer,
    "distill": DistillationTrainer,
}
DATA = {"sft": "chats", "prefer": "pairs", "reward": "pairs", "distill": "rows"}
# Two steps of four rows a pass; one row is left out.
LENGTHS = (1, 4, 2, 30, 3, 9, 1, 14, 5)


def chat(n, size):
    asked = {"role": "user", "content": f"name {n}"}
    return {"messages": [asked, {"role": "assistant", "content": "ab" * size}]}


ROWS = {
    "chats": chat,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and rows of very different lengths."""
    path = tmp_path_factory.mktemp("given")
    for seed, name in enumerate(("model", "teacher"), start=1):
        write_tiny_model(path / name, "tiny-qwen3", seed=seed)
    for kind, row in ROWS.items():
        rows = [row(n, size) for n, size in enumerate(LENGTHS)]
        if kind != "chats":
            rows = [{"prompt": f"name {n}: "} | each for n, each in enumerate(rows)]
        (path / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def options(folder, stage, run, data=None, **changes):
    """Give options of two recorded steps."""
    given = {
        "pretrain": str(folder / "model"),
        "output_dir": str(run),
        "prompt_data": str(folder / f"{data or DATA[stage]}.jsonl"),
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "actor_learning_rate": 2e-4,
        "lr_warmup_ratio": 0.0,
        "lr_scheduler": "linear",
        "audit_every": 1,
        "num_threads": 1,
    }
    if stage == "distill":
        given |= {"teacher": str(folder / "teacher"), "teacher_form": "forward"}
    return given | changes


@pytest.fixture
def recorded(folder, tmp_path):
    """Trains two recorded steps, and audits the second."""

    def run(stage, data=None, **changes):
        given = options(folder, stage, tmp_path / "run", data, **changes)
        TRAINERS[stage](TrainConfig(**given)).train()
        return audit_step(tmp_path / "run", 2)

    return run


PAIR_LOSSES = tuple(PREFERENCE_LOSSES)
WAYS = {
    "sft": ("sft", {}),
    "sft, adapters, packed": ("sft", {"lora_rank": 4, "packing_samples": True}),
    "sft, mean of rows": ("sft", {"sft_loss": "seq-mean-token-mean", "l2": 0.1}),
    "dft": ("sft", {"sft_loss": "dft"}),
    "dpo": ("prefer", {}),
    "every loss of pairs": (
        "prefer",
        {
            "preference_loss": PAIR_LOSSES,
            "preference_weights": tuple(0.1 * (1 + n % 4) for n in range(len(PAIR_LOSSES))),
        },
    ),
    "adapters, packed": ("prefer", {"lora_rank": 4, "packing_samples": True}),
    "labelled answers": ("prefer", {"data": "labels", "preference_loss": ("kto",), "l2": 0.1}),
    "pairs with margins": ("reward", {"centering_coef": 0.05}),
    "hps, adapters, packed": (
        "reward",
        {"reward_loss": "hps", "lora_rank": 4, "packing_samples": True},
    ),
    "rankings with ties": ("reward", {"data": "rankings", "reward_loss": "rao_kupper"}),
    "labels": ("reward", {"data": "labels", "micro_batch_tokens": 128}),
    "scores": ("reward", {"data": "scores", "reward_loss": "mse"}),
    "steps": ("reward", {"data": "steps"}),
    "forward": ("distill", {}),
    "reverse, adapters": ("distill", {"teacher_form": "reverse", "lora_rank": 4}),
    "jsd, packed": (
        "distill",
        {"teacher_form": "jsd", "teacher_beta": 0.3, "packing_samples": True},
    ),
}
QUICK_WAYS = ("sft, adapters, packed", "sft, mean of rows", "dft", "every loss of pairs")
QUICK_WAYS += ("pairs with margins", "steps", "jsd, packed")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in QUICK_WAYS else [slow]) for way in WAYS]
)
def test_a_step_is_recomputed_within_rounding(recorded, tmp_path, way):
    stage, changes = WAYS[way]
    report = recorded(stage, **changes)
    assert report.first_difference is None, verdict(report)
    found = {row.quantity: row for row in report.rows}
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
        assert found[name].verdict == "equal", found[name]
    assert found["actor weights after (change)"].own > 0
    # As in the output of --json: no truth values among the numbers.
    assert not any(isinstance(each, bool) for row in report.rows for each in (row.run, row.own))
    first = audit_step(tmp_path / "run", 1)
    assert first.first_difference is None, verdict(first)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_type_without_a_classifier_is_recomputed(lora_rank, recorded, folder, tmp_path):
    path = shutil.copytree(folder / "model", tmp_path / "granite")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "eos_token_id")
    of_qwen = json.loads((path / "config.json").read_text())
    config = GraniteConfig(**{name: of_qwen[name] for name in names}, num_attention_heads=4)
    GraniteForCausalLM(config).save_pretrained(path)
    report = recorded("reward", pretrain=str(path), lora_rank=lora_rank)
    assert report.first_difference is None, verdict(report)


@pytest.mark.full
def test_a_teacher_that_is_the_student_raises_no_alarm(recorded, folder):
    """Loss and gradient are rounding alone."""
    report = recorded("distill", teacher=str(folder / "model"), teacher_form="jsd")
    assert report.first_difference is None, verdict(report)


@slow
@pytest.mark.parametrize("stage", TRAINERS)
def test_bfloat16_raises_no_alarm(recorded, stage):
    report = recorded(stage, bf16=True, fsdp=True)
    assert report.first_difference is None, verdict(report)


def test_the_options_of_the_run_count_and_not_those_of_the_record(recorded, tmp_path):
    assert recorded("sft").first_difference is None
    path = tmp_path / "run" / "config.toml"
    text = path.read_text()
    assert "actor_learning_rate = 0.0002" in text
    path.write_text(text.replace("actor_learning_rate = 0.0002", "actor_learning_rate = 0.002"))
    first = audit_step(tmp_path / "run", 2).first_difference
    assert first is not None
    assert "learning rate" in first.quantity


def verdict_on_drawn_rows(report):
    assert report.first_difference is None, verdict(report)
    return next(row.verdict for row in report.rows if row.quantity == "rows of the data")


@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", TRAINERS)
def test_a_second_pass_after_a_resume_raises_no_alarm(folder, tmp_path, stage):
    more = {"max_epochs": 2, "max_steps": 3, "save_steps": 1, "fsdp": True}
    config = TrainConfig(**options(folder, stage, tmp_path / "run", **more))
    interrupted(TRAINERS[stage], config, 3)
    TRAINERS[stage](config).train()
    assert verdict_on_drawn_rows(audit_step(tmp_path / "run", 3)) == "equal"


@pytest.mark.full
def test_the_rows_of_a_run_that_went_on_with_other_options_are_not_audited(recorded):
    assert verdict_on_drawn_rows(recorded("sft", allow_changes=True)) == "not audited"


@pytest.mark.parametrize(
    "stage, name, code",
    [
        ("prefer", "preference_loss", "@preference_loss()\ndef own(sums): return -sums.gaps\n"),
        ("reward", "reward_loss", "def own(differences, is_tie): return -differences\n"),
    ],
)
def test_a_loss_of_ones_own_ends_the_audit_of_the_update(recorded, tmp_path, stage, name, code):
    (tmp_path / "own.py").write_text(
        f"from lightrft.algorithms.interface import preference_loss\n{code}"
    )
    text = f"{tmp_path / 'own.py'}:own"
    report = recorded(stage, **{name: (text,) if stage == "prefer" else text})
    assert report.first_difference is None, verdict(report)
    (row,) = [row for row in report.rows if row.quantity == "actor weights after"]
    assert (row.verdict, "caller's own" in row.note) == ("not audited", True)


def is_trained(change):
    """Other masks: never of padding."""

    def masks(padded):
        return change(padded.is_trained) & padded.attention_mask

    return fields(row_passes, "pad", is_trained=masks)


def without_ends(mask):
    return mask & mask.roll(-1, dims=1)


def with_the_first_prompt(original, rows, *args, **how):
    first = np.ones_like(rows[0].is_trained)
    first[0] = False
    return original([replace(rows[0], is_trained=first), *rows[1:]], *args, **how)


def count_tokens(mask, mode):
    return torch.tensor(float(mask.numel()), dtype=torch.float64)


def count_rows(mask, mode):
    return torch.tensor(float(len(mask)), dtype=torch.float64)


def of_the_next_step(original, step):
    step.data.next_draw()
    return original(step)


LOSS, SCORES = "policy loss, actor update 1", "scores, actor update 1"
DENOMINATOR = "denominator, actor update 1"
OF_SFT = {
    "the count is that of one rank": (
        DENOMINATOR,
        {},
        results(DistributedContext, "reduce_over_data", lambda total: total / 2),
    ),
    "prompts are counted": (
        DENOMINATOR,
        {},
        instead(supervised_objective, "local_normalizer", count_tokens),
    ),
    "the mask is shifted": (
        "response mask",
        {},
        is_trained(lambda mask: mask.roll(-1, dims=1)),
    ),
    "prompts are trained": ("response mask", {}, calls(row_passes, "pad", with_the_first_prompt)),
    "the end of a turn is left out": ("response mask", {}, is_trained(without_ends)),
    "the end of a turn is not in the rows": (
        "ends of trained turns",
        {},
        results(
            chat_turns.ChatTurns,
            "turns",
            lambda turns: [replace(turn, token_ids=turn.token_ids[:-1]) for turn in turns],
        ),
    ),
    "the learning rate is doubled": (
        "learning rate, actor update 1",
        {},
        fields(optimizers.AdamSettings, "read", lr=lambda settings: 2 * settings.lr),
    ),
    "rows are those of the next step": (
        "rows of the data",
        {},
        calls(row_stage, "drawn_places", of_the_next_step),
    ),
    "rows are trained twice": (
        "rows of the step",
        {},
        instead(SupervisedRow, "rows", property(lambda row: (row, row))),
    ),
}


def of_the_trained_model(original, model, items, part):
    return original(part.passes.model, items, part)


def warmer(patch):
    forward = head.LinearLogprobHead.forward

    def changed(self, hidden, targets=None, **how):
        return forward(self, hidden, targets, **{**how, "temperature": 1.02})

    patch.setattr(head.LinearLogprobHead, "forward", changed)
    # The proof at the start would name it.
    patch.setattr("lightrft.stages.models.prove_model", lambda *_, **__: None)


OF_PREFERENCES = {
    "chosen and rejected are swapped": (
        LOSS,
        {},
        fields(
            preference_objective.KnownPreferences,
            "sums",
            chosen=lambda sums: sums.rejected,
            rejected=lambda sums: sums.chosen,
        ),
    ),
    "pairs of one rank are counted": (
        LOSS,
        {},
        instead(preference_objective, "counts_of", lambda rows: (len(rows) // 2, len(rows))),
    ),
    "length normalisation is left out": (
        LOSS,
        {"preference_loss": ("simpo",)},
        instead(AnswerSums, "mean_logprobs", property(lambda sums: sums.logprobs / 8)),
    ),
    "the reference is the trained model": (
        "sums of the reference",
        {},
        calls(preference_objective, "score_items", of_the_trained_model),
    ),
    "adapters stay on for the reference": (
        "sums of the reference",
        {"lora_rank": 4},
        instead(lora.LoraModel, "adapters_off", lambda self: contextlib.nullcontext()),
    ),
    "beta is another": (
        LOSS,
        {},
        calls(
            preference_inputs,
            "build_loss",
            lambda original, config: original(config.replaced({"preference_args": {"beta": 0.12}})),
        ),
    ),
    "the KL is that of the own prompt": (
        "log-ratio behind other prompts, actor update 1",
        {"preference_loss": ("kto",)},
        instead(preference_objective, "other_answers", lambda items, place: items[place].rows),
    ),
    "the SFT term is a mean of rows": (
        LOSS,
        {"preference_loss": ("dpo", "sft")},
        instead(preference_objective, "tokens_per_chosen", lambda items: 8.0),
    ),
    "logits have a temperature": ("logprobs, actor update 1", {}, warmer),
}


def at_padding(patch):
    calls(
        reward_model.RewardModel,
        "forward",
        lambda original, self, ids, mask, **how: original(self, ids, torch.ones_like(mask), **how),
    )(patch)
    # The proof at the start would name it.
    patch.setattr("lightrft.stages.reward.reward_inputs.prove_pooling", lambda *_: 1.0)


OF_REWARDS = {
    "the worse answer is rewarded": (
        LOSS,
        {},
        results(comparisons.Comparisons, "differences", lambda differences: -differences),
    ),
    "the margin is left out": (
        LOSS,
        {},
        fields(
            comparisons.Comparisons, "of", margins=lambda found: torch.zeros_like(found.margins)
        ),
    ),
    "centring is left out": (
        LOSS,
        {"centering_coef": 0.05},
        calls(
            reward_objective.RewardObjective,
            "sum_of_losses",
            lambda original, self, *args: original(replace(self, centering=0.0), *args),
        ),
    ),
    "scores are read at padding": (SCORES, {}, at_padding),
    "the head computes in bfloat16": (
        SCORES,
        {},
        results(reward_model.ScoreHead, "forward", lambda scores: scores.bfloat16().float()),
    ),
    "every pair of a ranking weighs 1": (
        LOSS,
        {"data": "rankings"},
        fields(comparisons.Comparisons, "of", weights=lambda found: torch.ones_like(found.weights)),
    ),
    "ties are preferences": (
        LOSS,
        {"data": "rankings"},
        fields(comparisons.Comparisons, "of", is_tie=lambda found: torch.zeros_like(found.is_tie)),
    ),
    "steps are counted by row": (
        DENOMINATOR,
        {"data": "steps"},
        instead(reward_objective, "count_losses", lambda judgements, name: len(judgements)),
    ),
}


def divergence(change):
    return calls(divergence_objective, "divergence", change)


def with_the_student_as_teacher(original, self, config, *args):
    return original(self, config.replaced({"teacher": config.pretrain}), *args)


OF_DISTILLATION = {
    "the divergence is that of the other direction": (
        LOSS,
        {},
        divergence(lambda original, *logits, **_: original(*logits, form="reverse")),
    ),
    "the mixture weighs the student": (
        LOSS,
        {"teacher_form": "jsd", "teacher_beta": 0.3},
        divergence(
            lambda original, *logits, form, beta: original(*logits, form=form, beta=1 - beta)
        ),
    ),
    "the teacher has a temperature": (
        LOSS,
        {},
        divergence(
            lambda original, student, teacher, **how: original(student, teacher / 1.02, **how)
        ),
    ),
    "the teacher is one token behind": (
        LOSS,
        {},
        divergence(
            lambda original, student, teacher, **how: original(student, teacher.roll(1, 0), **how)
        ),
    ),
    "the teacher is another": (
        LOSS,
        {},
        calls(divergence_inputs.DivergenceInputs, "load", with_the_student_as_teacher),
    ),
    "rows are counted instead of tokens": (
        DENOMINATOR,
        {},
        instead(supervised_objective, "local_normalizer", count_rows),
    ),
}


def misses_a_step_of_its_schedule(patch):
    steps_taken = itertools.count()
    # The first call is that of the constructor.
    calls(
        optimizers.PlannedLR,
        "step",
        lambda original, self, *args: None if next(steps_taken) == 1 else original(self, *args),
    )(patch)


halves_gradients = calls(
    model_training.ModelTraining,
    "backward",
    lambda original, self, loss, *args: original(self, loss / 2, *args),
)
OF_DATA = "rows of the data"
row_is_drawn_twice = results(row_stage, "drawn_places", lambda places: [places[0], *places[:-1]])
# What the audit names first, the stage, options of the run, and what plants the fault.
BUGS = {}
for stage, table in zip(
    TRAINERS, (OF_SFT, OF_PREFERENCES, OF_REWARDS, OF_DISTILLATION), strict=True
):
    table |= {
        f"{stage} misses a step of its schedule": (
            "schedule position, actor",
            {},
            misses_a_step_of_its_schedule,
        ),
        f"{stage} draws a row twice and another never": (OF_DATA, {}, row_is_drawn_twice),
        f"{stage} halves gradients": ("gradient norm, actor update 1", {}, halves_gradients),
    }
    BUGS |= {name: (first, stage, *others) for name, (first, *others) in table.items()}
# The others take minutes together.
QUICK = (
    *OF_SFT,
    "chosen and rejected are swapped",
    "the reference is the trained model",
    "beta is another",
    "the margin is left out",
    "centring is left out",
    "scores are read at padding",
    "steps are counted by row",
    "the divergence is that of the other direction",
    "the teacher has a temperature",
    "prefer misses a step of its schedule",
)


@pytest.mark.cover(5)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [slow]) for name in BUGS]
)
def test_a_planted_fault_is_named(recorded, monkeypatch, name):
    first, stage, changes, plant = BUGS[name]
    plant(monkeypatch)
    report = recorded(stage, **changes)
    assert report.first_difference is not None
    assert report.first_difference.quantity == first, verdict(report)


def in_ranks(rank, world_size, given):
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    for stage, settings, fault in given:
        if fault and stage == "sft":
            DistributedContext.reduce_over_data = lambda self, value, *args: value
        elif fault:
            preference_objective.counts_of = lambda x: (len(x) // 2, len(x) // 2)
        TRAINERS[stage](TrainConfig(**settings, fsdp=True)).train()


@pytest.mark.full
def test_two_ranks_are_sound_and_a_mean_of_each_is_found(folder, tmp_path):
    runs = {
        "sft": {},
        "sft, sequence parallel": {"sp_size": 2, "sft_loss": "seq-mean-token-mean"},
        "prefer": {"preference_loss": ("dpo", "aot", "kto")},
        "reward": {"data": "rankings", "micro_train_batch_size": 1},
        "distill": {"sp_size": 2},
        "prefer by rank": {},
        "sft by rank": {},
    }
    given = []
    for name, way in runs.items():
        stage = name.partition(" ")[0].rstrip(",")
        given.append((stage, options(folder, stage, tmp_path / name, **way), "by" in name))
    run_multiprocess(in_ranks, 2, timeout_seconds=400, args=(given,))
    reports = {name: audit_step(tmp_path / name, 2) for name in runs}
    assert verdict_on_drawn_rows(reports["sft"]) == "equal"
    firsts = {name: report.first_difference for name, report in reports.items()}
    found = {name: None if first is None else first.quantity for name, first in firsts.items()}
    wrong = {"prefer by rank": LOSS, "sft by rank": DENOMINATOR}
    assert found == dict.fromkeys(runs) | wrong
