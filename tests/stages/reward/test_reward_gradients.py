"""The gradient of a reward model's step is that of the formula, however it is carried out."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from tests.stages.reward.reward_world import (
    LABELLED,
    PAIRS,
    RANKED,
    STEPS,
    build_stage,
    slow_loss,
    slow_scores,
    tiny_classifier,
)
from tests.stages.stage_world import STILL, distance, require_formula, step_of

from lightrft.config import ConfigError
from lightrft.datasets.scored_rows import ScoredAnswer
from lightrft.stages.reward.score_proofs import prove_pooling
from lightrft.strategy import get_fake_strategy

step = partial(step_of, build_stage)
PACKED = {"packing_samples": True, "max_row_tokens": 100}


def classifier():
    torch.set_num_threads(1)
    return tiny_classifier().double()


def cross_entropies(scores, labels):
    return -(labels * scores.sigmoid().log() + (1 - labels) * (-scores).sigmoid().log())


@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula_in_float64(centering):
    model, result = classifier(), step(PAIRS, centering_coef=centering)
    require_formula(result, slow_loss(model, PAIRS, centering=centering), model)
    assert result[1]["num_tokens"] == 317


def test_metrics_are_those_of_all_scores():
    metrics = step(PAIRS)[1]
    with torch.no_grad():
        scores = slow_scores(classifier(), PAIRS)
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


@pytest.mark.parametrize("loss", [None, "mse"])
def test_labelled_answers_have_the_loss_of_their_labels(loss):
    result, model = step(LABELLED, reward_loss=loss), classifier()
    scores = slow_scores(model, LABELLED)
    labels = torch.tensor([each.is_good for each in LABELLED]).double()
    each = cross_entropies(scores, labels) if loss is None else (scores - labels).square()
    require_formula(result, each.mean(), model)
    right = ((scores > 0) == labels.bool()).double().mean().item()
    expected = pytest.approx(right) if loss is None else None
    assert result[1].get("accuracy") == expected
    assert distance(step(LABELLED, reward_loss=loss, **PACKED)[0], result[0]) <= 1e-6


def test_given_scores_are_regressed_on():
    goals, model = (2.5, -1.0, 0.25, 0.0), classifier()
    scored = [ScoredAnswer(each.answer, n) for each, n in zip(LABELLED, goals, strict=True)]
    expected = (slow_scores(model, scored) - torch.tensor(goals)).square().mean()
    require_formula(step(scored, reward_loss="mse"), expected, model)


@pytest.mark.parametrize("loss", [None, "rao_kupper"])
def test_all_pairs_of_a_ranking_weigh_as_much_as_one_pair(loss):
    result, model = step(RANKED, reward_loss=loss), classifier()
    first, second = slow_scores(model, RANKED).split([3, 2])

    def better(a, b):
        return -(a - b - (0.5 if loss else 0)).sigmoid().log()

    def tie(a, b):
        both = better(a, b) + better(b, a) - math.log(math.e - 1)
        return both if loss else 0.01 * (a - b).abs()

    # The ranks are 2, 1, 2 and 7, 3.
    each = better(first[1], first[0]) + better(first[1], first[2]) + tie(first[0], first[2])
    require_formula(result, (each / 3 + better(second[1], second[0])) / 2, model)
    wins = [(first[1] > first[0]).item(), (first[1] > first[2]).item()]
    accuracy = (sum(wins) / 3 + (second[1] > second[0]).item()) / (2 / 3 + 1)
    assert result[1]["accuracy"] == pytest.approx(accuracy)
    assert distance(step(RANKED, reward_loss=loss, **PACKED)[0], result[0]) <= 1e-6


def test_steps_have_the_mean_loss_over_all_steps_and_no_later_text_is_seen():
    result, model = step(STEPS), classifier()
    ends = [np.flatnonzero(each.answer.is_trained) for each in STEPS]
    # transformers scores the text up to the end of each step.
    scores = torch.stack(
        [
            model(torch.from_numpy(each.answer.token_ids).long()[None, : end + 1]).logits[0, 0]
            for each, places in zip(STEPS, ends, strict=True)
            for end in places
        ]
    )
    labels = torch.tensor([label for each in STEPS for label in each.labels]).double()
    require_formula(result, cross_entropies(scores, labels).mean(), model)
    gradient, metrics = result
    assert metrics["accuracy"] == pytest.approx(((scores > 0) == labels.bool()).double().mean())
    correlation = np.corrcoef(scores.detach().numpy(), np.concatenate(ends))[0, 1]
    assert metrics["length_correlation"] == pytest.approx(correlation, abs=1e-5)
    for way in (PACKED, {"micro_train_batch_size": 2}):
        again, others = step(STEPS, **way)
        assert distance(again, gradient) <= 1e-6
        assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-6)


def test_the_start_proves_where_scores_are_read():
    stage = build_stage(get_fake_strategy(STILL), PAIRS)
    assert prove_pooling(stage.models.main.model, stage.data.rows, stage.strategy.context) > 0
    model = stage.models.main.model
    right = model.forward

    def first_token(token_ids, attention_mask):
        return right(token_ids[:, :1], attention_mask[:, :1])

    def any_place(token_ids, attention_mask):
        return right(token_ids, torch.ones_like(attention_mask))

    for wrong in (first_token, any_place):
        model.forward = wrong
        with pytest.raises(ConfigError, match="must come from its last token and not from padding"):
            prove_pooling(stage.models.main.model, stage.data.rows, stage.strategy.context)
