"""Preferences and stages on a tiny model whose reference is another one, for tests."""

from __future__ import annotations

import copy

import numpy as np
import torch
from tests.models.tiny import tiny_model
from tests.stages.supervised.supervised_world import STILL

from lightrft.config import TrainConfig
from lightrft.datasets.preference_rows import LabelledAnswer, PreferencePair, PreferenceRows
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.models import Actor, LoraActor
from lightrft.stages.policy.models import configure_model, trained_model
from lightrft.stages.preference.preference_stage import PreferenceStage
from lightrft.stages.stage import Step, TrainedModels


def pair(prompt, chosen, rejected, *, seed=0):
    """Two answers of so many random tokens to a prompt of so many."""
    random = np.random.default_rng([seed, prompt, chosen, rejected])
    ids = random.integers(2, 131, prompt, dtype=np.int32)
    rows = []
    for length in (chosen, rejected):
        answer = random.integers(2, 131, length, dtype=np.int32)
        is_trained = np.arange(prompt + length) >= prompt
        rows.append(SupervisedRow(np.concatenate([ids, answer]), is_trained))
    return PreferencePair(*rows)


# Answers whose lengths differ by a factor of 100; and two pairs that transport exchanges.
RAGGED = (pair(5, 100, 1), pair(30, 7, 7), pair(12, 1, 40), pair(30, 7, 7, seed=4))
LABELLED = tuple(
    LabelledAnswer(each, is_good)
    for item, is_good in zip(RAGGED, (True, False, True, False), strict=True)
    for each in item.rows[:1]
)


def noisy_model(*, seed=5, size=0.02):
    """The tiny model with other weights, as it might be after some steps."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def build_stage(strategy, items, **changes):
    """A stage whose optimizer does not move the model; its reference is `tiny_model`."""
    options = {"micro_train_batch_size": 1, "fused_linear_logprob": True, **changes}
    config = TrainConfig(train_batch_size=len(items), **STILL, **options)
    reference = None
    if config.lora_rank:
        actor = LoraActor(tiny_model(), config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    else:
        actor, reference = Actor(noisy_model()), Actor(tiny_model())
    for model in (actor, reference):
        if model is not None:
            configure_model(model, config)
    ready, _, _, reference = strategy.prepare_models_and_optimizers(
        actor, None, None, reference, config, 1
    )
    models = TrainedModels((trained_model("actor", ready),))
    return PreferenceStage(config, strategy, models, reference, PreferenceRows(items, ""), items)


def train_step(stage, items):
    """Gradient by name, and metrics, of one step."""
    trained = stage.models.main
    named = dict(stage.strategy.unwrap_model(trained.model).named_parameters())
    found = {}

    def keep(*_):
        for name, value in named.items():
            if value.grad is not None:
                grad = value.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                found[name] = whole.detach().clone()

    trained.optimizer.register_step_pre_hook(keep)
    trained.model.eval()
    batch = stage.batch_of(tuple(items), 1)
    trained.model.train()
    step = Step(1)
    stage.update(batch, step)
    return found, stage.finish(batch, step.metrics.reduce(stage.strategy))


def slow_sums(model, items):
    """[items, answers] sums and numbers of tokens in float64, row by row, from whole logits."""
    sums = []
    for item in items:
        for each in item.rows:
            ids = torch.from_numpy(each.token_ids).long()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            places = np.flatnonzero(each.is_trained)
            sums.append(sum(logprobs[place - 1, ids[place]] for place in places))
    return torch.stack(sums).view(len(items), -1)


def slow_gradient(loss, items):
    """Loss and gradient in float64; `loss` is a function of (sums, reference sums, model, other).

    Args:
        loss: Of [items, answers] each, and of both models.
        items: To train on.
    """
    model, reference = copy.deepcopy(noisy_model()).double(), tiny_model().double()
    with torch.no_grad():
        ref = slow_sums(reference, items)
    total = loss(slow_sums(model, items), ref, model, reference)
    total.backward()
    return total.item(), {f"model.{n}": value.grad for n, value in model.named_parameters()}
