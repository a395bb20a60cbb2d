"""The gradient of a step on preferences is that of the formula, however the step is carried out."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.models.tiny import tiny_model
from tests.stages.preference.preference_world import (
    LABELLED,
    RAGGED,
    build_stage,
    noisy_model,
    slow_sums,
)
from tests.stages.stage_world import STILL, distance, require_formula, step_of, train_step

from lightrft.datasets.preference_rows import PreferencePair
from lightrft.stages.preference.preference_objective import behind, other_answers
from lightrft.strategy import get_fake_strategy

TOKENS = torch.tensor([[row.num_trained for row in item.rows] for item in RAGGED]).double()
# Losses with their options, and the loss of a step in the slow form.
S = F.logsigmoid
LOSSES = {
    "dpo": ({"preference_args": {"beta": 0.3}}, lambda x, ref, *_: -S(0.3 * gaps(x, ref)).mean()),
    "ipo sft": (
        {"preference_loss": ("ipo", "sft"), "preference_weights": (0.1, 0.5)},
        lambda x, ref, *_: (
            0.1 * ((((x - ref) / TOKENS) @ SIGN) - 5).square().mean()
            - 0.5 * x[:, 0].sum() / TOKENS[:, 0].sum()
        ),
    ),
    "aot": (
        {"preference_loss": ("aot",)},
        lambda x, ref, *_: -S(0.1 * ((x @ SIGN).sort().values - (ref @ SIGN).sort().values)).mean(),
    ),
    "kto": ({"preference_loss": ("kto",)}, lambda *given: slow_kto(*given).mean()),
    "orpo": (
        {"preference_loss": ("orpo",)},
        lambda x, *_: -x[:, 0].sum() / TOKENS[:, 0].sum() - 0.1 * S(odds(x / TOKENS) @ SIGN).mean(),
    ),
}
SIGN = torch.tensor([1.0, -1.0], dtype=torch.float64)


def gaps(sums, reference):
    return (sums - reference) @ SIGN


def odds(means):
    return means - torch.log(-torch.expm1(means))


def slow_kl(items, model, reference):
    """The mean log-ratio of answers that belong to the next prompt, at least 0."""
    moved = []
    for place, item in enumerate(items):
        prompt = item.rows[0].token_ids[: int(item.rows[0].is_trained.argmax())]
        following = items[(place + 1) % len(items)]
        moved.append(replace_rows(following, [behind(prompt, row) for row in following.rows]))
    with torch.no_grad():
        ratios = slow_sums(model, moved) - slow_sums(reference, moved)
    return max(0.0, float(ratios.mean()))


def replace_rows(item, rows):
    return PreferencePair(*rows) if len(rows) == 2 else replace(item, answer=rows[0])


def slow_kto(sums, reference, model, other):
    kl, ratios = slow_kl(RAGGED, model, other), sums - reference
    return 1 - torch.sigmoid(0.1 * (ratios - kl) * SIGN)


@cache
def one_pair_per_pass(name):
    torch.set_num_threads(1)
    return step_of(build_stage, RAGGED, **LOSSES[name][0])


def require_loss(step, loss, items):
    """Check a step against a loss of (sums, sums of the reference, and both models)."""
    model, reference = noisy_model().double(), tiny_model().double()
    with torch.no_grad():
        ref = slow_sums(reference, items)
    expected = loss(slow_sums(model, items), ref, model, reference)
    require_formula(step, expected, model, within=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula_in_float64(name):
    require_loss(one_pair_per_pass(name), LOSSES[name][1], RAGGED)


def test_transport_in_halves_of_the_step_would_be_found():
    whole, _ = one_pair_per_pass("aot")
    first, second = (
        step_of(build_stage, items, preference_loss=("aot",))[0]
        for items in (RAGGED[:2], RAGGED[2:])
    )
    mean = {name: (first[name] + second[name]) / 2 for name in whole}
    assert distance(mean, whole) > 1e-3


def test_labelled_answers_give_the_gradient_of_the_formula():
    options = {"preference_loss": ("kto",), "preference_args": {"undesirable_weight": 1.5}}
    step = step_of(build_stage, LABELLED, **options)

    def loss(sums, reference, model, other):
        signs = torch.tensor([[1.0], [-1.0]] * 2, dtype=torch.float64)
        weights = torch.tensor([[1.0], [1.5]] * 2, dtype=torch.float64)
        kl = slow_kl(LABELLED, model, other)
        return (weights * (1 - torch.sigmoid(0.1 * signs * (sums - reference - kl)))).mean()

    require_loss(step, loss, LABELLED)
    assert "accuracy" not in step[1]


def test_answers_of_one_prompt_are_no_others():
    first, second = RAGGED[0], RAGGED[1]
    assert other_answers((first, first), 0) is None
    (row, _) = other_answers((first, first, second), 0)
    assert np.array_equal(row.token_ids[5:], second.chosen.token_ids[30:])
    assert row.num_trained == second.chosen.num_trained


@pytest.mark.parametrize("loss", ["dpo", "kto", "aot"])
def test_without_adapters_an_adapted_model_is_its_own_reference(loss):
    stage = build_stage(get_fake_strategy(STILL), RAGGED, preference_loss=(loss,), lora_rank=4)
    batch = stage.batch_of(RAGGED, 1)
    with torch.no_grad():
        expected = slow_sums(tiny_model().double(), batch.part.local_items)
    torch.testing.assert_close(batch.known.ref_logprobs, expected, rtol=1e-5, atol=1e-4)
    gradient, metrics = train_step(stage, RAGGED)
    assert gradient.keys() == {name for name in gradient if "lora" in name} != set()
    assert abs(metrics["margin"]) > 1e-3


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_evaluation_gives_the_metrics_of_the_step(name):
    stage = build_stage(get_fake_strategy(STILL), RAGGED, **LOSSES[name][0])
    _, metrics = train_step(stage, RAGGED)
    found = stage.evaluate()
    of_kto = ("answer_kl",) if name == "kto" else ()
    for each in ("loss", "accuracy", "margin", "chosen_reward", "rejected_logprob", *of_kto):
        assert found[f"eval/{each}"] == pytest.approx(metrics[each], rel=1e-5)
    if of_kto:
        expected = slow_kl(RAGGED, noisy_model().double(), tiny_model().double())
        assert metrics["answer_kl"] == pytest.approx(expected, rel=1e-4)
