"""One optimizer batch and one epoch: the update's own forward is the one before the update."""

import math

import pytest
from tests.engines.altered_engines import ShiftedEngine, plant
from tests.models.batches import relative_norm

from lightrft.stages.policy.maker import ExperienceMaker

SINGLE = {"train_batch_size": 16, "micro_train_batch_size": 4, "micro_rollout_batch_size": 4}


class NoisyEngine(ShiftedEngine):
    """Its logprobs are those of somewhat different weights."""

    def shift(self, completion, place):
        return 1.5 * math.sin(7 * place + completion.request_id) ** 2


def noisy_world(build_world, **options):
    world = build_world(**SINGLE, ledger_gate=False, parity_check_steps=-1, **options)
    plant(world.strategy, world.trainer.actor, NoisyEngine)
    return world


def step_of(world):
    batch = world.trainer.make_experience()
    return batch, world.trainer.ppo_train(1), world.weights()


SAME = (
    "policy_loss",
    "approx_kl",
    "ratio_mean",
    "grad_norm",
    "entropy",
    "logprob_diff_mean",
    "logprob_diff_max",
    "reward",
    "kl",
    "correction_weight",
    "correction_rejected_share",
    "correction_effective_share",
)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy_coef": 0.01},
        {"policy_loss": "gspo"},
        {"policy_loss": "cpgd"},
        {"with_reference": True, "use_kl_loss": True},
        {"with_critic": True, "advantage_estimator": "gae"},
    ],
)
def test_leaving_out_the_forward_changes_nothing(build_world, monkeypatch, options):
    compare_with_a_forward(lambda: build_world(**SINGLE, **options), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"off_policy_correction": "tis"},
        {"off_policy_correction": "mis off-policy-mask", "policy_loss": "gspo"},
        {"off_policy_correction": "icepop", "top_p": 0.9},
        {"off_policy_correction": "icepop", "fused_linear_logprob": True},
        {"off_policy_correction": "token-veto tis", "with_reference": True, "use_kl_loss": True},
    ],
)
def test_corrections_take_the_logprobs_of_the_update(build_world, monkeypatch, options):
    metrics = compare_with_a_forward(lambda: noisy_world(build_world, **options), monkeypatch)
    # The engine is another policy: the corrections do something.
    assert metrics["logprob_diff_mean"] > 0.1
    assert metrics["correction_effective_share"] < 0.99


def compare_with_a_forward(build, monkeypatch):
    """The metrics of a step without a forward pass before it, equal to those with one."""
    batch, metrics, weights = step_of(build())
    assert batch.outputs.old_logprobs is None
    world = build()
    monkeypatch.setattr(ExperienceMaker, "reuses_policy_logprobs", lambda *_: False)
    full, expected, expected_weights = step_of(world)
    assert full.outputs.old_logprobs is not None
    assert set(expected) - set(metrics) <= {"forward_tokens_per_second"}
    for name in SAME:
        if name in expected:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert relative_norm(weights, expected_weights) <= 1e-6
    return metrics


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2},
        {"train_batch_size": 8},
        {"with_reference": True},  # the KL penalty in the reward needs logprobs first
        {"high_entropy_token_ratio": 0.2},
        {"off_policy_correction": "tis:mean-one"},
        {"off_policy_correction": "mis", "fused_linear_logprob": True},
        {
            "off_policy_correction": "tis",
            "fused_linear_logprob": True,
            "top_p": 0.9,
            "truncated_logprobs": "all",
        },
        {"with_critic": True, "advantage_estimator": "gae", "freezing_actor_steps": 1},
    ],
)
def test_the_forward_stays_where_somebody_needs_it(build_world, options):
    world = build_world(**{**SINGLE, **options})
    assert world.trainer.make_experience().outputs.old_logprobs is not None
