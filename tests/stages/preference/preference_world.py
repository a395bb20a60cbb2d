"""Preferences and stages on a tiny model whose reference is another one, for tests."""

import copy

import numpy as np
import torch
from tests.models.batches import perturb
from tests.models.tiny import tiny_model
from tests.stages.stage_world import configured, prepared
from tests.stages.supervised.supervised_world import build_actor

from lightrft.datasets.preference_rows import LabelledAnswer, PreferencePair
from lightrft.datasets.row_data import RowData, SupervisedRow
from lightrft.stages.models import configure_model
from lightrft.stages.preference.preference_loss import build_loss
from lightrft.stages.preference.preference_objective import PreferenceObjective
from lightrft.stages.rows.row_stage import RowStage


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


def noisy_model(model=None, *, seed=5, size=0.02):
    """A model (the tiny one) with other weights, as it might be after some steps."""
    model = copy.deepcopy(model or tiny_model())
    perturb(model, seed, size)
    return model


def build_stage(strategy, items, *, model=None, reference=None, held_out=None, **changes):
    """A stage on preferences.

    Args:
        strategy: Trains.
        items: To train on.
        model: Is trained; with adapters by default that of the reference, whose base it is.
        reference: `tiny_model` by default.
        held_out: The same by default.
        **changes: Options.
    """
    config = configured(items, **{"fused_linear_logprob": True, **changes})
    reference = reference or tiny_model()
    actor = build_actor(model or (reference if config.lora_rank else noisy_model()), config)
    frozen = None if config.lora_rank else build_actor(reference, config)
    models = prepared(strategy, actor, config)
    if frozen is not None:
        configure_model(frozen, config)
        frozen = strategy.prepare_model(frozen)
    objective = PreferenceObjective(build_loss(config), frozen)
    held_out = items if held_out is None else held_out
    return RowStage(config, strategy, models, RowData(items, ""), held_out, objective)


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
