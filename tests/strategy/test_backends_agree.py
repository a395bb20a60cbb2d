"""One program, every backend: the same losses, gradient norms and weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightrft.strategy.fake_strategy import FakeStrategy
from lightrft.strategy.testing import run_multiprocess

VOCAB = 251
NUM_STEPS = 3


class Scorer(nn.Module):
    """Logprob of every next token, entered through one forward like an actor."""

    is_actor = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids):
        logits = self.model(input_ids=token_ids, use_cache=False).logits.float()
        chosen = token_ids[:, 1:, None]
        return torch.log_softmax(logits[:, :-1], -1).gather(-1, chosen)[..., 0]


def build(*, is_tied: bool = True, seed: int = 0) -> Scorer:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        tie_word_embeddings=is_tied,
        max_position_embeddings=64,
    )
    return Scorer(Qwen3ForCausalLM(config))


def batch_of_step(step: int) -> list[list[torch.Tensor]]:
    """[rank][micro-batch] token ids; 2 or 3 micro-batches, unequal lengths, two ranks' worth."""
    generator = torch.Generator().manual_seed(100 + step)
    num_micro_batches = 2 + step % 2
    return [
        [
            torch.randint(0, VOCAB, (2, 5 + 3 * ((k + rank + step) % 3)), generator=generator)
            for k in range(num_micro_batches)
        ]
        for rank in range(2)
    ]


def own_micro_batches(step: int, rank: int, world_size: int) -> list[torch.Tensor]:
    per_rank = batch_of_step(step)
    return per_rank[rank] if world_size == 2 else [ids for part in per_rank for ids in part]


def token_count(step: int) -> int:
    return sum(ids[:, 1:].numel() for part in batch_of_step(step) for ids in part)


def train_step(strategy, ready, step: int, rank: int, world_size: int, *, poison: bool = False):
    """One optimizer step by shares of the token mean; returns the batch loss and the result."""
    micro_batches = own_micro_batches(step, rank, world_size)
    total, result = 0.0, None
    with strategy.accumulation(len(micro_batches), ready.optimizer):
        for ids in micro_batches:
            share = -ready.model(ids).sum() / token_count(step)
            if poison:
                share = share * float("nan")
            strategy.backward(share, ready.model, ready.optimizer)
            result = strategy.optimizer_step(
                ready.optimizer, ready.model, ready.scheduler, name="actor"
            )
            total += share.item()
    return strategy.all_reduce(total, op="sum"), result


def weight_norm(strategy, model) -> float:
    """Over all parameters, read through the interface that every backend offers."""
    source = strategy.parameter_source(model)
    total = sum(
        float(p.local_shard.double().square().sum()) / (1 if p.is_sharded else strategy.world_size)
        for p in source.parameters()
    )
    return strategy.all_reduce(total, op="sum") ** 0.5


def run_program(strategy, rank: int, world_size: int, *, is_tied: bool = True) -> dict[str, object]:
    ready, _, _, reference = strategy.prepare_models_and_optimizers(
        build(is_tied=is_tied), None, None, build(is_tied=is_tied), None, 10
    )
    losses, norms, rates = [], [], []
    for step in range(NUM_STEPS):
        loss, result = train_step(strategy, ready, step, rank, world_size)
        losses.append(loss)
        norms.append(result.grad_norm)
        rates.append(result.learning_rate)
        assert not result.is_skipped
    with torch.no_grad():
        reference_sum = float(reference(batch_of_step(0)[0][0]).sum())
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "weight_norm": weight_norm(strategy, ready.model),
        "reference": reference_sum,
    }


SETTINGS = {
    "actor_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.2,
    "l2": 0.1,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 1.0,
}


def fsdp_program(rank: int, world_size: int) -> dict[str, object]:
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    cells = {}
    with FSDPV2Strategy(1, 1.0, 1, world_size, args=SETTINGS) as strategy:
        cells["tied"] = run_program(strategy, rank, world_size)
        cells["untied"] = run_program(strategy, rank, world_size, is_tied=False)
    return cells


def expected(*, is_tied: bool) -> dict[str, object]:
    with FakeStrategy(1, 1.0, 1, 1, args=SETTINGS) as strategy:
        return run_program(strategy, 0, 1, is_tied=is_tied)


def assert_agrees(found: dict[str, object], reference: dict[str, object]) -> None:
    assert found["losses"] == pytest.approx(reference["losses"], abs=1e-6)
    assert found["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert found["rates"] == reference["rates"]
    assert found["weight_norm"] == pytest.approx(reference["weight_norm"], rel=1e-5)
    assert found["reference"] == pytest.approx(reference["reference"], rel=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp2_agrees_with_one_process(world_size):
    for cells in run_multiprocess(fsdp_program, world_size, timeout_seconds=120):
        assert_agrees(cells["tied"], expected(is_tied=True))
        assert_agrees(cells["untied"], expected(is_tied=False))
