"""One optimizer batch and one epoch: the update's own forward is the one before the update."""

import math

import pytest
import torch

from lightrft.stages.policy.maker import ExperienceMaker

SINGLE = {
    "train_batch_size": 16,
    "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 4,
    "args": {"train_batch_size": 16},
}


def step_of(world):
    batch = world.trainer.make_experience()
    return batch, world.trainer.ppo_train(1), world.weights()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy_coef": 0.01},
        {"policy_loss": "gspo"},
        {"policy_loss": "cpgd"},
        {"with_reference": True, "use_kl_loss": True},
        {"with_critic": True, "advantage_estimator": "gae"},
        {"off_policy_correction": "tis"},
        {"off_policy_correction": "mis off-policy-mask", "policy_loss": "gspo"},
        {"off_policy_correction": "icepop", "top_p": 0.9},
    ],
)
def test_leaving_out_the_forward_changes_nothing(build_world, monkeypatch, options):
    batch, metrics, weights = step_of(build_world(**SINGLE, **options))
    assert batch.outputs.old_logprobs is None
    world = build_world(**SINGLE, **options)
    monkeypatch.setattr(ExperienceMaker, "reuses_policy_logprobs", lambda *_: False)
    full, expected, expected_weights = step_of(world)
    assert full.outputs.old_logprobs is not None
    assert set(expected) - set(metrics) <= {"forward_tokens_per_second"}
    for name in (
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
    ):
        if name in expected:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    distance = math.sqrt(
        sum(float((weights[n] - expected_weights[n]).double().square().sum()) for n in weights)
    )
    assert distance <= 1e-6 * math.sqrt(
        sum(float(w.double().square().sum()) for w in weights.values())
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2},
        {"train_batch_size": 8, "args": {"train_batch_size": 8}},
        {"with_reference": True},  # the KL penalty in the reward needs logprobs first
        {"high_entropy_token_ratio": 0.2},
        {"off_policy_correction": "tis:mean-one"},
        {"off_policy_correction": "tis", "fused_linear_logprob": True},
        {"with_critic": True, "advantage_estimator": "gae", "freezing_actor_steps": 1},
    ],
)
def test_the_forward_stays_where_somebody_needs_it(build_world, options):
    world = build_world(**{**SINGLE, **options})
    assert world.trainer.make_experience().outputs.old_logprobs is not None


def test_dropout_keeps_the_forward(build_world):
    world = build_world(**SINGLE)
    model = world.strategy.unwrap_model(world.trainer.actor)
    assert world.trainer.make_experience().outputs.old_logprobs is None
    from lightrft.stages.policy.models import is_deterministic

    assert is_deterministic(model)
    model.config.attention_dropout = 0.1
    assert not is_deterministic(model)
    model.config.attention_dropout = 0.0
    model.extra = torch.nn.Dropout(0.1)
    assert not is_deterministic(model)
