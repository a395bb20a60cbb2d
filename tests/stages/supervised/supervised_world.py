"""Rows and stages of supervised training on a tiny model, for tests."""

import copy
import math

import numpy as np
import torch
from tests.models.tiny import tiny_model
from tests.stages.stage_world import configured, prepared, row

from lightrft.datasets.row_data import RowData
from lightrft.models import Actor, LoraActor
from lightrft.stages.rows.row_stage import RowStage
from lightrft.stages.supervised.supervised_objective import SupervisedObjective

# Trained tokens differ by a factor of 100, and two rows have none.
RAGGED = (row(110, 100), row(60, 0), row(50, 0), row(12, 1))


def build_actor(model, config):
    """An actor around a copy of a model, with adapters where the options ask for them."""
    model = copy.deepcopy(model)
    return LoraActor(model, config) if config.lora_rank else Actor(model)


def build_stage(strategy, rows, *, model=None, held_out=(), **changes):
    """A stage on rows."""
    config = configured(rows, **{"fused_linear_logprob": True, **changes})
    actor = build_actor(model or tiny_model(), config)
    models = prepared(strategy, actor, config)
    objective = SupervisedObjective.of(config)
    return RowStage(config, strategy, models, RowData(rows, ""), held_out, objective)


def slow_loss(model, rows, loss="token-mean"):
    """Return the loss of a model, row by row from whole logits."""
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
    return total
