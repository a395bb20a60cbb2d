"""Rows and stages of supervised training on a tiny model, for tests."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from tests.models.tiny import tiny_model

from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow, SupervisedRows
from lightrft.models import Actor
from lightrft.stages.policy.models import configure_model, trained_model
from lightrft.stages.stage import Step, TrainedModels
from lightrft.stages.supervised.supervised_stage import SupervisedStage


def row(length, trained, *, seed=0, at_end=True):
    """A row of random tokens, of which some at its end (or its beginning) are trained."""
    token_ids = np.random.default_rng([seed, length]).integers(2, 131, length, dtype=np.int32)
    places = np.arange(length)
    is_trained = places >= length - trained if at_end else (places > 0) & (places <= trained)
    return SupervisedRow(token_ids, is_trained)


# Trained tokens differ by a factor of 100, and two rows have none.
RAGGED = (row(110, 100), row(60, 0), row(50, 0), row(12, 1))

# Options of a strategy that neither clips nor moves.
STILL = {"max_norm": 0.0, "actor_learning_rate": 0.0}


def build_stage(strategy, rows, *, model=None, **changes):
    """A stage whose optimizer does not move the model."""
    options = {"micro_train_batch_size": 1, "fused_linear_logprob": True, **changes}
    config = TrainConfig(train_batch_size=len(rows), **STILL, **options)
    actor = Actor(copy.deepcopy(model) if model is not None else tiny_model())
    configure_model(actor, config)
    ready, *_ = strategy.prepare_models_and_optimizers(actor, None, None, None, config, 1)
    models = TrainedModels((trained_model("actor", ready),))
    return SupervisedStage(config, strategy, models, SupervisedRows(rows, ""))


def train_step(stage, rows):
    """Gradient by name, and metrics, of one step on the rows."""
    trained = stage.models.main
    named = dict(stage.strategy.unwrap_model(trained.model).named_parameters())
    found = {}

    def keep(*_):
        for name, value in named.items():
            if not value.requires_grad:
                continue
            grad = value.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name] = whole.detach().clone()

    trained.optimizer.register_step_pre_hook(keep)
    trained.model.train()
    step = Step(1)
    batch = stage.batch_of(tuple(rows), 1)
    stage.update(batch, step)
    return found, stage.finish(batch, step.metrics.reduce(stage.strategy))


def distance(found, expected):
    """Relative distance of two gradients in the norm over all tensors."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n] - expected[n]).double().square().sum()) for n in expected)
    return (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5


def slow_gradient(model, rows, loss="token-mean"):
    """Loss and gradient in float64, row by row, from whole logits."""
    model = copy.deepcopy(model).double()
    counts = [int(each.is_trained.sum()) for each in rows]
    num_rows, total = sum(count > 0 for count in counts), 0.0
    for each, count in zip(rows, counts, strict=True):
        token_ids = torch.from_numpy(each.token_ids).long()
        logprobs = model(token_ids[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(each.is_trained):
            logprob = logprobs[place - 1, token_ids[place]]
            if loss == "seq-mean-token-mean":
                total = total - logprob / count / num_rows
            elif loss == "dft":
                total = total - math.exp(logprob.item()) * logprob / sum(counts)
            else:
                total = total - logprob / sum(counts)
    total.backward()
    return total.item(), {name: value.grad for name, value in model.named_parameters()}
