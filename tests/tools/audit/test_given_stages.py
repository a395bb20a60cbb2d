"""Steps on preferences, of reward models and of divergences are recomputed; faults are named."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.algorithms.preference_losses import AnswerSums
from lightrft.config import TrainConfig
from lightrft.models import head, lora, reward_model
from lightrft.stages.distillation import divergence_inputs, divergence_objective
from lightrft.stages.preference import preference_inputs, preference_objective
from lightrft.stages.reward import comparisons, reward_objective
from lightrft.stages.rows import row_passes
from lightrft.stages.supervised import supervised_objective
from lightrft.strategy import model_training, optimizers
from lightrft.tools.audit.preference_losses import PREFERENCE_LOSSES
from lightrft.tools.audit.report import audit_step, verdict
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import DistillationTrainer, PreferenceTrainer, RewardTrainer

pytestmark = pytest.mark.shard("audit")
slow = pytest.mark.slow

TRAINERS = {
    "prefer": PreferenceTrainer,
    "reward": RewardTrainer,
    "distill": DistillationTrainer,
}
LENGTHS = (1, 4, 2, 30, 3, 9, 1, 14)
ROWS = {
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
        rows = ({"prompt": f"name {n}: "} | row(n, size) for n, size in enumerate(LENGTHS))
        (path / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def options(folder, stage, run, data=None, **changes):
    """Two recorded steps; the same rows twice where a stage reads rows of four."""
    given = {
        "pretrain": str(folder / "model"),
        "output_dir": str(run),
        "prompt_data": str(folder / f"{data or ('rows' if stage == 'distill' else 'pairs')}.jsonl"),
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


QUICK_WAYS = ("every loss of pairs", "pairs with margins", "steps", "jsd, packed")


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
    ):
        assert found[name].verdict == "equal", found[name]
    assert found["actor weights after (change)"].own > 0
    first = audit_step(tmp_path / "run", 1)
    assert first.first_difference is None, verdict(first)


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


@pytest.mark.parametrize(
    ("stage", "name"),
    [("prefer", "preference_loss"), ("reward", "reward_loss")],
)
def test_a_loss_of_ones_own_ends_the_audit_of_the_update(recorded, tmp_path, stage, name):
    code = {
        "prefer": "def own(sums):\n    return -sums.gaps\n",
        "reward": "def own(differences, is_tie):\n    return -differences\n",
    }
    (tmp_path / "own.py").write_text(
        "from lightrft.algorithms.interface import preference_loss\n"
        + ("@preference_loss()\n" if stage == "prefer" else "")
        + code[stage]
    )
    text = f"{tmp_path / 'own.py'}:own"
    report = recorded(stage, **{name: (text,) if stage == "prefer" else text})
    assert report.first_difference is None, verdict(report)
    (row,) = [row for row in report.rows if row.quantity == "actor weights after"]
    assert (row.verdict, "caller's own" in row.note) == ("not audited", True)


BUGS = {}


def bug(first, stage, **changes):
    """Registers a fault: what the audit names first, the run, and what plants it."""

    def add(plant):
        BUGS[plant.__name__] = (first, stage, changes, plant)
        return plant

    return add


def wrap(patch, owner, name, change):
    """Replaces owner.name by change(original)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(original)(change(original)))


LOSS, SCORES = "policy loss, actor update 1", "scores, actor update 1"


@bug(LOSS, "prefer")
def chosen_and_rejected_are_swapped(patch):
    def change(original):
        def sums(self, *args):
            found = original(self, *args)
            return replace(found, chosen=found.rejected, rejected=found.chosen)

        return sums

    wrap(patch, preference_objective.KnownPreferences, "sums", change)


@bug(LOSS, "prefer")
def pairs_of_one_rank_are_counted(patch):
    patch.setattr(preference_objective, "counts_of", lambda x: (len(x) // 2, len(x)))


@bug(LOSS, "prefer", preference_loss=("simpo",))
def length_normalisation_is_left_out(patch):
    patch.setattr(AnswerSums, "mean_logprobs", property(lambda self: self.logprobs / 8))


@bug("sums of the reference", "prefer")
def the_reference_is_the_trained_model(patch):
    def change(original):
        return lambda model, items, part: original(part.passes.model, items, part)

    wrap(patch, preference_objective, "score_items", change)


@bug("sums of the reference", "prefer", lora_rank=4)
def adapters_stay_on_for_the_reference(patch):
    patch.setattr(lora.LoraModel, "adapters_off", lambda self: contextlib.nullcontext())


@bug(LOSS, "prefer")
def beta_is_another(patch):
    def change(original):
        return lambda config: original(config.replaced({"preference_args": {"beta": 0.12}}))

    wrap(patch, preference_inputs, "build_loss", change)


@bug("log-ratio behind other prompts, actor update 1", "prefer", preference_loss=("kto",))
def kl_is_of_the_own_prompt(patch):
    patch.setattr(preference_objective, "other_answers", lambda items, place: items[place].rows)


@bug(LOSS, "prefer", preference_loss=("dpo", "sft"))
def the_sft_term_is_a_mean_of_rows(patch):
    patch.setattr(preference_objective, "tokens_per_chosen", lambda items: 8.0)


@bug("response mask", "prefer")
def answers_lose_their_end(patch):
    def change(original):
        def pad(*args, **given):
            found = original(*args, **given)
            kept = found.is_trained & found.is_trained.roll(-1, dims=1)
            return replace(found, is_trained=kept)

        return pad

    wrap(patch, row_passes, "pad", change)


def warmer(patch):
    def change(original):
        def forward(self, hidden, targets=None, **given):
            return original(self, hidden, targets, **{**given, "temperature": 1.02})

        return forward

    wrap(patch, head.LinearLogprobHead, "forward", change)


@bug("logprobs, actor update 1", "prefer")
def logits_of_preferences_have_a_temperature(patch):
    warmer(patch)
    # The proof at the start would name it.
    patch.setattr("lightrft.stages.models.prove_model", lambda *_, **__: None)


@bug(LOSS, "reward")
def the_worse_answer_is_rewarded(patch):
    def change(original):
        return lambda self, scores: -original(self, scores)

    wrap(patch, comparisons.Comparisons, "differences", change)


@bug(LOSS, "reward")
def the_margin_is_left_out(patch):
    def change(original):
        def of(*args):
            found = original(*args)
            return replace(found, margins=torch.zeros_like(found.margins))

        return of

    wrap(patch, comparisons.Comparisons, "of", change)


@bug(LOSS, "reward", centering_coef=0.05)
def centring_is_left_out(patch):
    def change(original):
        def losses(self, *args):
            return original(replace(self, centering=0.0), *args)

        return losses

    wrap(patch, reward_objective.RewardObjective, "sum_of_losses", change)


@bug(SCORES, "reward")
def scores_are_read_at_padding(patch):
    def change(original):
        def forward(self, token_ids, attention_mask, **given):
            whole = torch.ones_like(attention_mask)
            return original(self, token_ids, whole, **given)

        return forward

    wrap(patch, reward_model.RewardModel, "forward", change)
    # The proof at the start would name it.
    patch.setattr("lightrft.stages.reward.reward_inputs.prove_pooling", lambda *_: 1.0)


@bug(SCORES, "reward")
def the_head_computes_in_bfloat16(patch):
    def change(original):
        return lambda self, hidden: original(self, hidden).bfloat16().float()

    wrap(patch, reward_model.ScoreHead, "forward", change)


@bug(LOSS, "reward", data="rankings")
def every_pair_of_a_ranking_weighs_1(patch):
    def change(original):
        def of(*args):
            found = original(*args)
            return replace(found, weights=torch.ones_like(found.weights))

        return of

    wrap(patch, comparisons.Comparisons, "of", change)


@bug(LOSS, "reward", data="rankings")
def ties_are_preferences(patch):
    def change(original):
        def of(*args):
            found = original(*args)
            return replace(found, is_tie=torch.zeros_like(found.is_tie))

        return of

    wrap(patch, comparisons.Comparisons, "of", change)


@bug("denominator, actor update 1", "reward", data="steps")
def steps_are_counted_by_row(patch):
    patch.setattr(reward_objective, "count_losses", lambda judgements, name: len(judgements))


def divergence_with(patch, change):
    wrap(patch, divergence_objective, "divergence", change)


@bug(LOSS, "distill")
def the_divergence_is_that_of_the_other_direction(patch):
    def change(original):
        return lambda student, teacher, **given: original(student, teacher, form="reverse")

    divergence_with(patch, change)


@bug(LOSS, "distill", teacher_form="jsd", teacher_beta=0.3)
def the_mixture_weighs_the_student(patch):
    def change(original):
        return lambda *args, form, beta: original(*args, form=form, beta=1 - beta)

    divergence_with(patch, change)


@bug(LOSS, "distill")
def the_teacher_has_a_temperature(patch):
    def change(original):
        return lambda student, teacher, **given: original(student, teacher / 1.02, **given)

    divergence_with(patch, change)


@bug(LOSS, "distill")
def the_teacher_is_one_token_behind(patch):
    def change(original):
        return lambda student, teacher, **given: original(student, teacher.roll(1, 0), **given)

    divergence_with(patch, change)


@bug(LOSS, "distill")
def the_teacher_is_another(patch):
    def change(original):
        def load(self, config, *args):
            return original(self, config.replaced({"teacher": config.pretrain}), *args)

        return load

    wrap(patch, divergence_inputs.DivergenceInputs, "load", change)


@bug("denominator, actor update 1", "distill")
def rows_are_counted_instead_of_tokens(patch):
    def count(mask, mode):
        return torch.tensor(float(len(mask)), dtype=torch.float64)

    patch.setattr(supervised_objective, "local_normalizer", count)


def misses_a_step_of_its_schedule(patch):
    def change(original):
        calls = itertools.count()
        # The first call is that of the constructor.
        return lambda self, *args: None if next(calls) == 1 else original(self, *args)

    wrap(patch, optimizers.PlannedLR, "step", change)


def halves_gradients(patch):
    def change(original):
        return lambda self, loss, *args: original(self, loss / 2, *args)

    wrap(patch, model_training.ModelTraining, "backward", change)


for each in TRAINERS:
    BUGS[f"{each} misses a step of its schedule"] = (
        "schedule position, actor",
        each,
        {},
        misses_a_step_of_its_schedule,
    )
    BUGS[f"{each} halves gradients"] = ("gradient norm, actor update 1", each, {}, halves_gradients)


# The others take minutes together.
QUICK = (
    "chosen_and_rejected_are_swapped",
    "the_reference_is_the_trained_model",
    "beta_is_another",
    "answers_lose_their_end",
    "the_margin_is_left_out",
    "centring_is_left_out",
    "scores_are_read_at_padding",
    "steps_are_counted_by_row",
    "the_divergence_is_that_of_the_other_direction",
    "the_teacher_has_a_temperature",
    "prefer misses a step of its schedule",
)


@pytest.mark.cover(1)
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
        if fault:
            preference_objective.counts_of = lambda x: (len(x) // 2, len(x) // 2)
        TRAINERS[stage](TrainConfig(**settings, fsdp=True)).train()


@slow
@pytest.mark.multiprocess
def test_two_ranks_are_sound_and_a_mean_of_each_is_found(folder, tmp_path):
    runs = {
        "prefer": {"preference_loss": ("dpo", "aot", "kto")},
        "reward": {"data": "rankings", "micro_train_batch_size": 1},
        "distill": {"sp_size": 2},
        "prefer by rank": {},
    }
    given = [
        (name.split()[0], options(folder, name.split()[0], tmp_path / name, **way), "by" in name)
        for name, way in runs.items()
    ]
    run_multiprocess(in_ranks, 2, timeout_seconds=400, args=(given,))
    firsts = {name: audit_step(tmp_path / name, 2).first_difference for name in runs}
    found = {name: None if first is None else first.quantity for name, first in firsts.items()}
    assert found == dict.fromkeys(runs) | {"prefer by rank": LOSS}
