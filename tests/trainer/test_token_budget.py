"""Micro-batches cut by tokens give the step that micro-batches cut by rows give."""

import math

import pytest


def norm_of_difference(left, right):
    return math.sqrt(sum(float((left[n] - right[n]).double().square().sum()) for n in left))


@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_the_step_does_not_depend_on_the_budget(build_world, budget):
    results = []
    for options in ({}, {"micro_batch_tokens": budget}):
        world = build_world(
            with_critic=True,
            loss_agg_mode="token-mean",
            max_epochs=2,
            generate_max_len=12,
            **options,
        )
        start = world.weights()
        world.trainer.make_experience()
        results.append((world.trainer.ppo_train(1), world.weights()))
    (expected, weights), (metrics, again) = results
    for name in ("policy_loss", "grad_norm", "approx_kl", "entropy", "critic_loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert norm_of_difference(weights, again) < 1e-3 * norm_of_difference(start, weights)


def test_the_budget_sets_the_number_of_backward_passes(build_world, monkeypatch):
    world = build_world(micro_batch_tokens=1)
    count = []
    backward = world.strategy.backward
    monkeypatch.setattr(
        world.strategy, "backward", lambda *args, **kw: (count.append(1), backward(*args, **kw))
    )
    world.trainer.make_experience()
    world.trainer.ppo_train(1)
    assert len(count) == 16  # every row alone
