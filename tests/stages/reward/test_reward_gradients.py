"""The gradient of a reward model's step is that of the formula, however it is carried out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.stages.reward.reward_world import (
    LABELLED,
    PAIRS,
    RANKED,
    STEPS,
    build_stage,
    slow_gradient,
    slow_scores,
    tiny_classifier,
)
from tests.stages.stage_world import STILL, distance, train_step

from lightrft.config import ConfigError
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.stages.reward.comparisons import calibration_error
from lightrft.stages.reward.score_proofs import prove_pooling
from lightrft.strategy import get_fake_strategy


def step_of(preferences=PAIRS, **changes):
    return train_step(build_stage(get_fake_strategy(STILL), preferences, **changes), preferences)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return step_of()


def test_loss_and_gradient_are_those_of_the_formula_in_float64(plain):
    found, metrics = plain
    loss, gradient = slow_gradient(tiny_classifier(), PAIRS)
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["num_tokens"] == 317


def test_metrics_are_those_of_all_scores(plain):
    metrics = plain[1]
    with torch.no_grad():
        scores = slow_scores(tiny_classifier().double(), PAIRS)
    differences = scores[::2] - scores[1::2]
    lengths = np.array([len(row.token_ids) for each in PAIRS for row in each.rows])
    expected = {
        "score": scores.mean(),
        "score_std": scores.std(correction=0),
        "score_margin": differences.mean(),
        "accuracy": (differences > 0).double().mean(),
        "longer_accuracy": 1.5 / 4,
        "even_accuracy": (differences[2] > 0).double(),
        "length_correlation": np.corrcoef(scores.numpy(), lengths)[0, 1],
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-5), name


def test_centring_is_part_of_the_loss():
    found, metrics = step_of(centering_coef=0.3)
    loss, gradient = slow_gradient(tiny_classifier(), PAIRS, centering=0.3)
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("loss", [None, "mse"])
def test_labelled_answers_have_the_loss_of_their_labels(loss):
    found, metrics = step_of(LABELLED, reward_loss=loss)
    model = tiny_classifier().double()
    scores = slow_scores(model, LABELLED)
    labels = torch.tensor([each.is_good for each in LABELLED]).double()
    each = -(labels * scores.sigmoid().log() + (1 - labels) * (-scores).sigmoid().log())
    expected = each.mean() if loss is None else (scores - labels).square().mean()
    expected.backward()
    gradient = {f"model.{name}": value.grad for name, value in model.named_parameters()}
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert ("accuracy" in metrics) == (loss is None)
    if loss is None:
        right = ((scores > 0) == labels.bool()).double().mean().item()
        assert metrics["accuracy"] == pytest.approx(right)
    packed, _ = step_of(LABELLED, reward_loss=loss, packing_samples=True, max_row_tokens=100)
    assert distance(packed, found) <= 1e-6


def test_given_scores_are_regressed_on():
    given = (2.5, -1.0, 0.25, 0.0)
    scored = [ScoredAnswer(each.answer, n) for each, n in zip(LABELLED, given, strict=True)]
    found, metrics = step_of(scored, reward_loss="mse")
    model = tiny_classifier().double()
    expected = (slow_scores(model, scored) - torch.tensor(given)).square().mean()
    expected.backward()
    gradient = {f"model.{name}": value.grad for name, value in model.named_parameters()}
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("loss", [None, "rao_kupper"])
def test_all_pairs_of_a_ranking_weigh_as_much_as_one_pair(loss):
    found, metrics = step_of(RANKED, reward_loss=loss)
    model = tiny_classifier().double()
    first, second = slow_scores(model, RANKED).split([3, 2])

    def better(a, b):
        return -(a - b - (0.5 if loss else 0)).sigmoid().log()

    def tie(a, b):
        both = better(a, b) + better(b, a) - math.log(math.e - 1)
        return both if loss else 0.01 * (a - b).abs()

    # The ranks are 2, 1, 2 and 7, 3.
    each = better(first[1], first[0]) + better(first[1], first[2]) + tie(first[0], first[2])
    expected = (each / 3 + better(second[1], second[0])) / 2
    expected.backward()
    gradient = {f"model.{name}": value.grad for name, value in model.named_parameters()}
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    wins = [(first[1] > first[0]).item(), (first[1] > first[2]).item()]
    accuracy = (sum(wins) / 3 + (second[1] > second[0]).item()) / (2 / 3 + 1)
    assert metrics["accuracy"] == pytest.approx(accuracy)
    packed, _ = step_of(RANKED, reward_loss=loss, packing_samples=True, max_row_tokens=100)
    assert distance(packed, found) <= 1e-6


def test_steps_have_the_mean_loss_over_all_steps_and_no_later_text_is_seen():
    found, metrics = step_of(STEPS)
    model = tiny_classifier().double()
    ids = [torch.from_numpy(each.answer.token_ids).long()[None] for each in STEPS]
    ends = [np.flatnonzero(each.answer.is_trained) for each in STEPS]
    # transformers scores the text up to the end of each step.
    scores = torch.stack(
        [
            model(whole[:, : end + 1]).logits[0, 0]
            for whole, places in zip(ids, ends, strict=True)
            for end in places
        ]
    )
    labels = torch.tensor([label for each in STEPS for label in each.labels]).double()
    losses = -(labels * scores.sigmoid().log() + (1 - labels) * (-scores).sigmoid().log())
    losses.mean().backward()
    gradient = {f"model.{name}": value.grad for name, value in model.named_parameters()}
    assert distance(found, gradient) <= 1e-5
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(((scores > 0) == labels.bool()).double().mean())
    correlation = np.corrcoef(scores.detach().numpy(), np.concatenate(ends))[0, 1]
    assert metrics["length_correlation"] == pytest.approx(correlation, abs=1e-5)
    for way in ({"packing_samples": True, "max_row_tokens": 100}, {"micro_train_batch_size": 2}):
        again, others = step_of(STEPS, **way)
        assert distance(again, found) <= 1e-6
        assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def test_worked_numbers_of_pairs_with_margins_and_centring():
    scores = torch.tensor([1.2, 0.5, -0.3, 0.4], dtype=torch.float64)
    for margin, coefficient, expected in [
        (None, 0.0, 0.7531860489),
        (0.5, 0.0, 0.8506624591),
        (None, 0.01, 0.7531860489 + 0.0145),
    ]:
        pairs = (replace(PAIRS[0], margin=margin), replace(PAIRS[1], margin=None))
        stage = build_stage(get_fake_strategy(STILL), pairs, centering_coef=coefficient)
        found = stage.sum_of_losses(pairs, scores).item() / 2
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("packs", [False, True])
def test_scores_are_those_of_transformers_row_by_row(packs):
    stage = build_stage(get_fake_strategy(STILL), PAIRS, packing_samples=packs)
    with torch.no_grad():
        expected = slow_scores(tiny_classifier(), PAIRS).double()
        torch.testing.assert_close(stage.score(PAIRS), expected, rtol=0, atol=2e-5)
        changed = replace(PAIRS[0], chosen=PAIRS[1].rejected)
        after = stage.score([changed, *PAIRS[1:]])
    torch.testing.assert_close(after[1:], expected[1:], rtol=0, atol=2e-5)


def test_the_start_proves_where_scores_are_read():
    stage = build_stage(get_fake_strategy(STILL), PAIRS)
    assert prove_pooling(stage.models.main.model, stage.data.rows, stage.strategy) > 0
    model = stage.models.main.model
    right = model.forward

    def first_token(token_ids, attention_mask):
        return right(token_ids[:, :1], attention_mask[:, :1])

    def any_place(token_ids, attention_mask):
        return right(token_ids, torch.ones_like(attention_mask))

    for wrong in (first_token, any_place):
        model.forward = wrong
        with pytest.raises(ConfigError, match="must come from its last token and not from padding"):
            prove_pooling(stage.models.main.model, stage.data.rows, stage.strategy)


def test_calibration_is_the_mean_distance_of_confidence_and_accuracy():
    # Two bins: 3 answers with confidence 0.9, of which 1 is right, and 1 right one with 0.6.
    sums = torch.tensor([3.0, 1.0, 2.7, 0.6, 1.0, 1.0])
    assert calibration_error(sums) == pytest.approx((1.7 + 0.4) / 4)
    assert calibration_error(torch.zeros(6)) is None
