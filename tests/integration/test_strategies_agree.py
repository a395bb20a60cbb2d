"""The same completions give the same losses, gradients and weights on every strategy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from tests.engines.fake_engine import FakeEngine
from tests.integration.small_world import NUM_PROMPTS, NUM_STEPS, tiny_actor, trainer_on
from tests.ranks import run_multiprocess
from tests.runs import TextReward

from lightrft.datasets.types import Prompt
from lightrft.engines.factory import ENGINES

VOCAB = 36


class ReplayEngine(FakeEngine):
    """Replays completions of unequal lengths that depend on nothing but the request."""

    def weights_copy(self) -> dict[str, np.ndarray]:
        return {name: t.detach().numpy().copy() for name, t in self.weights.tensors.items()}


def scripted(request, sample_index):
    rng = random.Random(1000 * request.request_id + sample_index)
    tokens = [rng.randrange(7, VOCAB) for _ in range(rng.randint(1, 12))]
    return tokens, [-1.5] * len(tokens)


@dataclass(frozen=True)
class Trace:
    """What one strategy computed: per step token losses, gradient norms and final weights."""

    token_losses: list[np.ndarray]
    grad_norms: list[float]
    weight_norms: list[float]
    weights: dict[str, np.ndarray]
    ratio_max: float


def record_losses(rows: list):
    """Adds a policy loss to the registry that also keeps the loss of every token."""
    from lightrft.algorithms import policy_loss
    from lightrft.config import register

    @register("policy_loss", "recorded")
    @policy_loss(aggregation="token-mean")
    def recorded(logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.2):
        from lightrft.algorithms.policy.clipped import clipped_policy_loss

        loss = clipped_policy_loss(
            logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high
        )
        for row in range(len(mask)):
            kept = mask[row]
            key = (int(kept.sum()), round(float(old_logprobs[row][kept].double().sum()), 2))
            rows.append((key, loss.loss[row][kept].detach().numpy().copy()))
        return loss


def train(rank: int, world_size: int, backend: str) -> tuple:
    # The trainer checks its options: the engine stands under a name that users can choose.
    ENGINES["hf"] = lambda config, *, module=None: _replay(config, module)
    rows: list = []
    record_losses(rows)
    trainer = trainer_on(
        backend,
        tiny_actor(vocab_size=37, initializer_range=0.05, tie_word_embeddings=False),
        TextReward(lambda text: sum(map(ord, text)) % 7 / 7),
        max_norm=0.5,
        micro_rollout_batch_size=3,
        generate_max_len=16,
        advantage_estimator="dr_grpo",
        policy_loss="recorded",
        engine_args={"vocab_size": 37, "eos_token_id": -1},
        enable_engine_sleep=False,
    )
    prompts = [
        Prompt(i, f"p{i}", tuple(7 + (3 * i + j) % 29 for j in range(2 + i)))
        for i in range(NUM_PROMPTS)
    ]
    losses, grad_norms, weight_norms, ratio_max = [], [], [], 0.0
    for step in range(NUM_STEPS):
        rows.clear()
        trainer.make_experience(prompts[rank::world_size])
        metrics = trainer.ppo_train(step)
        losses.append(list(rows))
        grad_norms.append(metrics["grad_norm"])
        ratio_max = max(ratio_max, metrics["ratio_max"])
        weights = trainer.strategy.inference_engine.weights_copy()
        squares = sum(float((w.astype(float) ** 2).sum()) for w in weights.values())
        weight_norms.append(squares**0.5)
    return losses, grad_norms, weight_norms, weights, ratio_max


def _replay(config, module):
    engine = ReplayEngine.for_module(config, module)
    engine.script = scripted
    return engine


def gather(results: list[tuple]) -> Trace:
    """Joins the rows of all ranks in an order that does not depend on ranks."""
    per_step = []
    for step in range(NUM_STEPS):
        rows = sorted((row for losses, *_ in results for row in losses[step]), key=lambda r: r[0])
        per_step.append(np.concatenate([values for _, values in rows]))
    _, grad_norms, weight_norms, weights, ratio_max = results[0]
    return Trace(per_step, grad_norms, weight_norms, weights, ratio_max)


@pytest.fixture(scope="module")
def expected() -> Trace:
    trace = gather([run_multiprocess(train, 1, timeout_seconds=120, args=("fake",))[0]])
    assert trace.ratio_max > 1.01  # the second mini-batch of a step sees a moved policy
    assert all(norm > 0 for norm in trace.grad_norms)
    return trace


def assert_equal(actual: Trace, expected: Trace) -> None:
    for mine, theirs in zip(actual.token_losses, expected.token_losses, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(actual.grad_norms, expected.grad_norms, rtol=1e-5)
    np.testing.assert_allclose(actual.weight_norms, expected.weight_norms, rtol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp2_equals_one_process(world_size, expected):
    actual = run_multiprocess(train, world_size, timeout_seconds=120, args=("fsdp",))
    assert_equal(gather(actual), expected)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.deepspeed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_one_process(stage, world_size, expected):
    actual = run_multiprocess(train, world_size, timeout_seconds=240, args=(f"zero{stage}",))
    assert_equal(gather(actual), expected)


def test_the_comparison_catches_a_planted_difference(expected):
    off = [values + 1e-4 for values in expected.token_losses]
    planted = Trace(off, expected.grad_norms, expected.weight_norms, expected.weights, 0.0)
    with pytest.raises(AssertionError):
        assert_equal(planted, expected)
