"""The fused head under FSDP2 and ZeRO-3: values and all gradients are those of the plain model."""

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess

from lightrft.models.support import SamplingSupport
from lightrft.models.types import Replayed

VOCAB = 251
CHUNK = 100  # does not divide the vocabulary
WORLD_SIZE = 2
SETTINGS = {
    "actor_learning_rate": 1e-3,
    "lr_warmup_ratio": 0.0,
    "bf16": False,
    "engine_type": "hf",
    "timeout_minutes": 2.0,
}


def build(*, is_tied, is_fused):
    from lightrft.models.actor import Actor

    return Actor(
        tiny_model(vocab_size=VOCAB, tie_word_embeddings=is_tied, max_position_embeddings=64),
        fused_linear_logprob=is_fused,
        chunk_size=CHUNK,
    )


def batch_of(rank):
    """Unequal lengths; some positions are not scored; signed upstream gradients."""
    generator = torch.Generator().manual_seed(10 + rank)
    token_ids = torch.randint(0, VOCAB, (3, 11), generator=generator)
    attention_mask = torch.arange(11) < torch.tensor([[11], [7 + rank], [4]])
    scored_mask = attention_mask & (torch.arange(11) > 2)
    return token_ids, attention_mask, scored_mask, torch.randn(2, 3, 11, generator=generator)


def score(actor, rank):
    token_ids, attention_mask, scored_mask, upstream = batch_of(rank)
    output = actor(
        token_ids,
        attention_mask,
        scored_mask=scored_mask,
        temperature=0.8,
        entropy="grad",
        recorded=Replayed(SamplingSupport(top_k=40, top_p=0.7)),
    )
    loss = (output.logprobs * upstream[0] + output.entropy * upstream[1]).sum()
    return output, loss


def plain_model(*, is_tied):
    """Outputs by rank and gradients by name of the whole model with the plain head."""
    actor = build(is_tied=is_tied, is_fused=False)
    outputs = []
    for rank in range(WORLD_SIZE):
        output, loss = score(actor, rank)
        loss.backward()
        outputs.append((output.logprobs.detach(), output.entropy.detach(), output.log_kept_mass))
    return outputs, {name: p.grad for name, p in actor.named_parameters()}


def full_gradient(parameter):
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    return parameter.grad.full_tensor()


def compare(strategy, rank, *, is_tied):
    outputs, want = plain_model(is_tied=is_tied)
    model = build(is_tied=is_tied, is_fused=True)
    ready = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-3), None))
    with strategy.accumulation(1, ready.optimizer):
        output, loss = score(ready.model, rank)
        strategy.backward(loss, ready.model, ready.optimizer)
        named = strategy.unwrap_model(ready.model).named_parameters()
        found = {name: full_gradient(p).float() for name, p in named}
        strategy.optimizer_step(ready.optimizer, ready.model, None)
    norm = torch.stack([g.norm() for g in want.values()]).norm()
    errors = {name: float((found[name] - want[name]).norm()) for name in want}
    kept = {
        name: errors[name] / float(want[name].norm())
        for name in want
        if want[name].norm() > 1e-4 * norm
    }
    logprobs, entropy, mass = outputs[rank]
    return {
        "logprobs": float((output.logprobs - logprobs).abs().max()),
        "entropy": float((output.entropy - entropy).abs().max()),
        "kept mass": float((output.log_kept_mass - mass).abs().max()),
        "least kept mass": float(mass.min()),
        "all gradients": sum(e**2 for e in errors.values()) ** 0.5 / float(norm),
        "worst gradient": max(kept.values()),
        "head gradient": float(want[head_name(want)].norm() / norm),
        "num_parameters": len(found) - len(want),
    }


def head_name(names):
    return next(
        n for n in ("model.lm_head.weight", "model.model.embed_tokens.weight") if n in names
    )


def run_cells(rank, world_size, backend):
    from lightrft.strategy import get_strategy

    results = {}
    for is_tied in (True, False):
        args = {**SETTINGS, "fsdp": backend == "fsdp", "zero_stage": 3, "max_norm": 0.0}
        with get_strategy(args) as strategy:
            results[is_tied] = compare(strategy, rank, is_tied=is_tied)
    return results


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_values_and_all_gradients_equal_the_plain_models(backend):
    for rows in run_multiprocess(run_cells, WORLD_SIZE, args=(backend,), timeout_seconds=280):
        for cell, row in rows.items():
            assert row["num_parameters"] == 0, cell
            assert row["logprobs"] < 2e-5, (cell, row)
            assert row["entropy"] < 2e-5, (cell, row)
            assert row["kept mass"] < 2e-5, (cell, row)
            assert row["least kept mass"] < -1e-2, "something must be excluded"
            assert row["all gradients"] < 1e-6, (cell, row)
            assert row["worst gradient"] < 5e-6, (cell, row)
            assert row["head gradient"] > 0.05, "the head's gradient must count in the comparison"


def test_the_comparison_sees_a_head_of_another_temperature():
    """Positive control: a fused head that scores at another temperature differs by far more."""
    actor = build(is_tied=False, is_fused=True)
    token_ids, attention_mask, scored_mask, _ = batch_of(0)
    found = actor(token_ids, attention_mask, scored_mask=scored_mask, temperature=0.81)
    want = plain_model(is_tied=False)[0][0][0]
    assert (found.logprobs - want).abs().max() > 1e-3
