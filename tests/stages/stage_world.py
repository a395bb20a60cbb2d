"""One optimizer step of any stage on given rows, around a tiny model, for tests."""

import numpy as np
import pytest
import torch
from torch.optim import SGD

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.stages.models import configure_model, trained_model
from lightrft.stages.stage import Step, TrainedModels
from lightrft.strategy import get_fake_strategy

# Options of a strategy that does not clip.
STILL = {"max_norm": 0.0}
# Weights go so far that the gradient can be read off them, whatever a strategy keeps of it.
RATE = 2.0**20


def row(length, trained, *, seed=0, at_end=True):
    """A row of random tokens, of which some at its end (or its beginning) are trained."""
    token_ids = np.random.default_rng([seed, length]).integers(2, 131, length, dtype=np.int32)
    places = np.arange(length)
    is_trained = places >= length - trained if at_end else (places > 0) & (places <= trained)
    return SupervisedRow(token_ids, is_trained)


def configured(items, **changes):
    """Options of a step on these items, one of them a pass unless the changes say otherwise."""
    options = {**STILL, "micro_train_batch_size": 1, **changes}
    return TrainConfig(train_batch_size=len(items), **options)


def prepared(strategy, model, config):
    """The model with plain descent, from whose step its gradient can be read off."""
    configure_model(model, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".lora_B." in name:
                # At first 0, with which the other factor has no gradient.
                value.copy_(torch.linspace(-0.1, 0.1, value.numel()).view_as(value))
    if strategy.backend.wraps_before_optimizer:
        model = strategy.prepare_model(model, is_training=True)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=RATE)
    return TrainedModels((trained_model("actor", strategy.prepare((model, optimizer, None))),))


def train_step(stage, items):
    """Gradient by name, and metrics, of one step; the weights are put back. Collective."""
    trained = stage.models.main
    named = {
        name: value
        for name, value in stage.strategy.unwrap_model(trained.model).named_parameters()
        if value.requires_grad
    }
    before = {name: value.detach().clone() for name, value in named.items()}
    trained.model.eval()
    batch = stage.batch_of(tuple(items), 1)
    trained.model.train()
    step = Step(1)
    stage.update(batch, step)
    found = {}
    for name, value in named.items():
        moved = (before[name] - value.detach()) / RATE
        found[name] = moved.full_tensor() if hasattr(moved, "full_tensor") else moved
        with torch.no_grad():
            value.copy_(before[name])
    return found, stage.finish(batch, step.metrics.reduce(stage.strategy.context))


def distances(found, expected):
    """Relative distance of two gradients, and that of the worst tensor of which there is enough."""
    assert found.keys() == expected.keys()
    squares = torch.tensor(
        [
            [float(x.double().square().sum()) for x in (found[name] - value, value)]
            for name, value in expected.items()
        ]
    ).double()
    differences, norms = squares.sqrt().unbind(1)
    whole = norms.norm()
    worst = (differences / norms)[norms > 1e-4 * whole].max()
    return float(differences.norm() / whole), float(worst)


def distance(found, expected):
    """Relative distance of two gradients in the norm over all tensors."""
    return distances(found, expected)[0]


def step_of(build, items, **options):
    """Return gradient and metrics of a step of a stage that a function builds, in one process."""
    return train_step(build(get_fake_strategy(STILL), items, **options), items)


def require_formula(step, loss, model, *, within=1e-5):
    """Check gradient and loss of a step against a loss in float64 of a model."""
    gradient, metrics = step
    loss.backward()
    grads = {f"model.{name}": value.grad for name, value in model.named_parameters()}
    assert distance(gradient, {n: g for n, g in grads.items() if g is not None}) <= within
    assert metrics["loss"] == pytest.approx(loss.item(), rel=within / 10)
