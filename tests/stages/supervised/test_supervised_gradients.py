"""The gradient of a supervised step is that of the formula, however the step is carried out."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.stages.stage_world import STILL, distance, train_step
from tests.stages.supervised.supervised_world import RAGGED, build_stage, slow_gradient

from lightrft.algorithms.aggregation import local_normalizer, loss_weights
from lightrft.stages.supervised.supervised_stage import LOSSES
from lightrft.strategy import get_fake_strategy


def one_row_per_pass():
    return train_step(build_stage(get_fake_strategy(STILL), RAGGED), RAGGED)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return one_row_per_pass()


def test_loss_and_gradient_are_those_of_the_formula_in_float64(plain):
    found, metrics = plain
    loss, gradient = slow_gradient(tiny_model(), RAGGED)
    prefixed = {f"model.{name}": value for name, value in gradient.items()}
    assert distance(found, prefixed) <= 1e-5
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["num_tokens"] == 232
    assert metrics["trained_share"] == pytest.approx(101 / 232)


@pytest.fixture(scope="module", params=["seq-mean-token-mean", "dft"])
def named(request):
    return request.param, slow_gradient(tiny_model(), RAGGED, request.param)


@pytest.mark.parametrize("fused", [False, True])
def test_named_losses_are_those_of_their_formulas_in_float64(plain, named, fused):
    name, (loss, gradient) = named
    how = {"fused_linear_logprob": fused}
    stage = build_stage(get_fake_strategy(STILL), RAGGED, sft_loss=name, **how)
    found, metrics = train_step(stage, RAGGED)
    prefixed = {f"model.{name}": value for name, value in gradient.items()}
    assert distance(found, prefixed) <= 1e-5
    assert distance(found, plain[0]) > 0.1
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["nll"] == pytest.approx(plain[1]["loss"], rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(plain[1]["perplexity"], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_slope_of_a_loss_is_its_finite_difference_with_its_weights_held(name):
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    direction = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]).bool()
    found, mode = LOSSES[name], LOSSES[name].aggregation
    weights = loss_weights(mask, mode, dtype=torch.float64)

    def chosen(logits):
        return torch.where(mask, logits.log_softmax(-1)[..., 2], 0.0)

    held = chosen(logits).exp() if name == "dft" else torch.ones(2, 4, dtype=torch.float64)

    def value(step):
        moved = chosen(logits + step * direction)
        return (-moved * held * weights).sum() / local_normalizer(mask, mode)

    leaf = logits.clone().requires_grad_()
    loss = found.share(chosen(leaf), weights, local_normalizer(mask, mode))
    loss.backward()
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert loss.item() == pytest.approx(float(value(0.0)), rel=1e-12)
    assert float((leaf.grad * direction).sum()) == pytest.approx(float(slope), rel=1e-8)


def test_a_mean_of_row_means_would_be_found(plain):
    means = [train_step(build_stage(get_fake_strategy(STILL), [r]), [r])[0] for r in RAGGED[::3]]
    mean = {name: (means[0][name] + means[1][name]) / 2 for name in means[0]}
    assert distance(mean, plain[0]) > 0.1


def test_a_step_without_trained_tokens_has_loss_and_gradient_0():
    found, metrics = train_step(build_stage(get_fake_strategy(STILL), RAGGED[1:3]), RAGGED[1:3])
    assert all(not value.any() for value in found.values())
    assert metrics["loss"] == 0.0
