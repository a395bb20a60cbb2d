"""The gradient of a supervised step is that of the formula, however the step is carried out."""

import math
from functools import cache

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.stages.stage_world import distance, require_formula, step_of
from tests.stages.supervised.supervised_world import RAGGED, build_stage, slow_loss

from lightrft.algorithms.aggregation import local_normalizer, loss_weights
from lightrft.algorithms.supervised_losses import LOSSES


@cache
def plain():
    """The step on the mean over tokens, one row a pass."""
    torch.set_num_threads(1)
    return step_of(build_stage, RAGGED)


@pytest.mark.parametrize(
    "name, fused",
    [("token-mean", True), *((n, f) for n in ("seq-mean-token-mean", "dft") for f in (0, 1))],
)
def test_loss_and_gradient_are_those_of_the_formula_in_float64(name, fused):
    changes = {"sft_loss": name, "fused_linear_logprob": bool(fused)}
    step = step_of(build_stage, RAGGED, **changes)
    model = tiny_model().double()
    loss = slow_loss(model, RAGGED, name)
    require_formula(step, loss, model)
    metrics, others = step[1], plain()[1]
    if name == "token-mean":
        assert metrics["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-5)
        assert metrics["num_tokens"] == 232
        assert metrics["trained_share"] == pytest.approx(101 / 232)
    else:
        assert distance(step[0], plain()[0]) > 0.1
        assert metrics["nll"] == pytest.approx(others["loss"], rel=1e-6)
        assert metrics["perplexity"] == pytest.approx(others["perplexity"], rel=1e-5)


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


def test_a_mean_of_row_means_would_be_found():
    first, second = (step_of(build_stage, [each])[0] for each in RAGGED[::3])
    mean = {name: (value + second[name]) / 2 for name, value in first.items()}
    assert distance(mean, plain()[0]) > 0.1


def test_a_step_without_trained_tokens_has_loss_and_gradient_0():
    gradient, metrics = step_of(build_stage, RAGGED[1:3])
    assert all(not value.any() for value in gradient.values())
    assert metrics["loss"] == 0.0
