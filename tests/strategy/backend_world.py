"""Small actors that every strategy trains on the same batches.

The batch of a step does not depend on the number of ranks, so that one process says which losses
and norms any number of them must have.
"""

import pytest
import torch
from tests.models.tiny import tiny_model
from torch import nn

from lightrft.models import Actor
from lightrft.strategy import get_fake_strategy, get_strategy

VOCAB = 97
SETTINGS = {
    "seed": 1,
    # Two micro-batches on each of two ranks, four on one.
    "train_batch_size": 4,
    "micro_train_batch_size": 1,
    "actor_learning_rate": 1e-2,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 2.0,
}
ZERO = {f"zero{stage}": {"zero_stage": stage} for stage in range(4)}
BACKENDS = {"fsdp2": {"fsdp": True}, **ZERO}


def make(backend, **changes):
    """Return a strategy: "fake" or one of `BACKENDS`."""
    if backend == "fake":
        return get_fake_strategy({**SETTINGS, **changes})
    return get_strategy({**SETTINGS, **BACKENDS[backend], **changes})


def build(seed=0, *, is_tied=True):
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    return Actor(tiny_model(seed=seed, tie_word_embeddings=is_tied, **shape))


def prepared(strategy, model=None, **options):
    """Return an actor that is ready to train, with its optimizer and schedule."""
    model = build(**options) if model is None else model
    return strategy.prepare_models_and_optimizers(model, None, None, None, None, 10)[0]


def batch_of_step(step):
    """Return token ids by rank and micro-batch: two ranks, 2 or 3 micro-batches of other widths."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        [
            torch.randint(0, VOCAB, (2, 5 + 3 * ((k + rank + step) % 3)), generator=generator)
            for k in range(2 + step % 2)
        ]
        for rank in range(2)
    ]


class OddShapes(nn.Module):
    """Parameters that no number of ranks divides; one is frozen."""

    shapes = {"odd": (7, 3), "one_row": (1, 5), "vector": (5,), "cube": (4, 2, 3), "even": (6, 2)}

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in self.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.cube.requires_grad_(False)

    def forward(self, scale):
        return scale * sum(parameter.square().sum() for parameter in self.parameters())


def micro_batches(strategy, step):
    """Return what this rank has of a step."""
    per_rank = batch_of_step(step)
    return (
        per_rank[strategy.get_rank()] if strategy.world_size == 2 else [*per_rank[0], *per_rank[1]]
    )


def logprobs(model, ids):
    return model(ids, torch.ones_like(ids, dtype=torch.bool)).logprobs


def train_step(strategy, ready, step, *, factor=1.0):
    """Take a step by shares of the mean over tokens; return the batch's loss and the result."""
    num_tokens = sum(ids[:, 1:].numel() for part in batch_of_step(step) for ids in part)
    rows, total = micro_batches(strategy, step), 0.0
    with strategy.accumulation(len(rows), ready.optimizer):
        for ids in rows:
            share = -factor * logprobs(ready.model, ids).sum() / num_tokens
            strategy.backward(share, ready.model, ready.optimizer)
            result = strategy.optimizer_step(
                ready.optimizer, ready.model, ready.scheduler, name="actor"
            )
            total += share.item()
    return strategy.all_reduce(total, op="sum"), result


def train(strategy, ready, steps):
    """Return the loss and the gradient norm of each step."""
    results = [train_step(strategy, ready, step) for step in steps]
    return [[loss, result.grad_norm] for loss, result in results]


def near(rows, rel=1e-5):
    """Return losses and norms to compare others with."""
    return [pytest.approx(row, rel=rel) for row in rows]


def weights(strategy, model):
    """Return copies of this rank's parts of the weights."""
    return [p.local_shard.clone() for p in strategy.parameter_source(model).parameters()]


def are_equal(left, right):
    return all(map(torch.equal, left, right))


def largest_difference(left, right):
    pairs = zip(left, right, strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs if a.numel())


def refusal(action):
    """Return what an action says when it refuses."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "accepted"
