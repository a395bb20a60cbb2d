"""Numbers that speak: what is wrong with a step or a whole run is counted, said and kept."""

import json
import math

import pytest
import torch
from tests.runs import TextReward, rollout_options, train, write_inputs

from lightrft.cli.errors import ExitCode, exit_code_of
from lightrft.config import TrainConfig
from lightrft.reporting.alarms import alarms, run_verdict, why_unchanged
from lightrft.rewards.types import RewardResult
from lightrft.stages.metrics import RunAlarmError
from lightrft.strategy.distributed.process_end import NonFiniteError, NumericsError
from lightrft.tools.report.page import find_alarms, render_report
from lightrft.tools.report.run_data import read_run

FINE = {
    "actor_lr": 1e-3,
    "skipped_steps": 0.0,
    "zero_gradient_share": 0.0,
    "weights_changed": 1.0,
    "reward": 0.5,
    "reward_std": 0.1,
    "advantage_abs": 0.4,
    "constant_group_share": 0.5,
    "num_samples": 16.0,
    "nonfinite/logprobs": 0.0,
}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, None),
        ({"policy_loss": math.nan}, "not finite: policy_loss is nan"),
        ({"ratio_max": math.inf, "kl": -math.inf}, "not finite: ratio_max is inf, kl is -inf"),
        ({"skipped_steps": 0.5}, "skipped_steps is 0.5, above 0"),
        ({"critic_skipped_steps": 1.0}, "critic_skipped_steps is 1, above 0"),
        ({"nonfinite/rewards": 2.0}, "nonfinite/rewards is 2, above 0"),
        ({"nonfinite/logprobs": 1.0}, "nonfinite/logprobs is 1, above 0"),
        ({"nonfinite/losses": 1.0}, "nonfinite/losses is 1, above 0"),
        ({"reward_std": 0.0}, "all rewards are equal (mean 0.5)"),
        ({"constant_group_share": 1.0}, "the rewards of every group are equal"),
        ({"zero_gradient_share": 1.0, "advantage_abs": 0.0}, "no advantage differs from 0"),
        ({"zero_gradient_share": 1.0}, "does not depend on the weights"),
        ({"actor_lr": 0.0, "weights_changed": 0.0}, "the learning rate was 0"),
        ({"weights_changed": 0.0}, "no weight changed"),
        ({"dynamic/skipped_steps": 1.0}, "dynamic_sampling found no other ones"),
    ],
)
def test_what_is_wrong_with_a_step_is_an_alarm_without_any_bound(changes, expected):
    found = alarms(TrainConfig(), {**FINE, **changes}, compares_groups=True)
    assert len(found) == (expected is not None), found
    assert expected is None or expected in found[0]


def test_equal_groups_are_an_alarm_only_where_groups_are_compared():
    assert alarms(TrainConfig(), {**FINE, "constant_group_share": 1.0}) == []
    alone = {**FINE, "constant_group_share": 1.0, "reward_std": 0.0, "num_samples": 1.0}
    assert alarms(TrainConfig(), alone, compares_groups=True) == []


def test_a_frozen_actor_is_no_alarm():
    frozen = {
        name: value
        for name, value in FINE.items()
        if name not in ("actor_lr", "skipped_steps", "zero_gradient_share", "weights_changed")
    }
    assert why_unchanged(frozen) is None
    assert alarms(TrainConfig(), frozen) == []


def test_the_verdict_of_a_run_counts_its_steps():
    zero = {**FINE, "zero_gradient_share": 1.0, "advantage_abs": 0.0}
    skipped = {**FINE, "skipped_steps": 1.0, "policy_loss": None}
    assert run_verdict([]) == "no update: no step was done"
    assert run_verdict([FINE, {**FINE, "reward": 0.75}]) == (
        "trained: 2 of 2 steps changed the weights, reward 0.5 in the first and 0.75 in the last"
    )
    found = run_verdict([FINE, zero, skipped])
    assert found.startswith("trained: 1 of 3 steps changed the weights, reward 0.5")
    assert "1 of 3 steps: the gradient was 0 in every optimizer step" in found
    assert "1 of 3 steps: every optimizer step was skipped" in found
    assert "1 of 3 steps had numbers that were not finite" in found
    assert run_verdict([zero, zero]) == (
        "no update: 2 of 2 steps: the gradient was 0 in every optimizer step: no advantage "
        "differs from 0"
    )
    assert "freezing_actor_steps" in run_verdict([{"reward": 1.0}])


class Scripted(TextReward):
    """Rewards from a function of the sample's position."""

    parallel_calls = 0
    whole_batch = True

    def score(self, prompts, responses, labels, columns):
        return [RewardResult(self.of(i), {}) for i in range(len(responses))]


def one_step(world, capsys):
    world.trainer.fit()
    text = capsys.readouterr().out
    return [line.split(": ", 2)[-1] for line in text.splitlines() if "alarm after step 1" in line]


def test_a_healthy_step_has_no_alarm_and_changes_the_weights(build_world, capsys):
    class Last:
        metrics = {}

        def log(self, step, metrics):
            self.metrics = metrics

        def close(self):
            pass

    last = Last()
    world = build_world(max_steps=1, with_reference=True, with_critic=False, loggers=[last])
    assert one_step(world, capsys) == []
    assert last.metrics["weights_changed"] == 1
    assert last.metrics["zero_gradient_share"] == 0
    for name in ("rewards", "logprobs", "losses"):
        assert last.metrics[f"nonfinite/{name}"] == 0


@pytest.mark.parametrize(
    "reward, expected",
    [
        (lambda i: 0.5, ["all rewards are equal (mean 0.5)"]),
        (lambda i: i // 4, ["the rewards of every group are equal"]),
        (lambda i: 1e300 * (i % 2), ["reward_std is inf", "spread"]),
    ],
)
def test_rewards_that_teach_nothing_are_said(build_world, capsys, reward, expected):
    world = build_world(max_steps=1, reward=Scripted(reward))
    before = world.weights()
    found = one_step(world, capsys)
    assert len(found) == len(expected), found
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence
    assert world.is_unmoved(before)


def test_rewards_beyond_float32_end_the_step_by_name(build_world):
    world = build_world(
        max_steps=1, reward=Scripted(lambda i: 1e300 * (i % 2)), advantage_estimator="dr_grpo"
    )
    with pytest.raises(NumericsError, match="advantages must be finite") as caught:
        world.trainer.fit()
    assert exit_code_of(caught.value) == ExitCode.NUMERICS == 9


def test_a_gradient_that_is_not_finite_is_counted_said_and_changes_nothing(build_world, capsys):
    world = build_world(max_steps=1)
    weight = next(iter(world.actor.parameters()))
    weight.register_hook(lambda gradient: gradient * math.nan)
    before = world.weights()
    world.trainer.fit()
    text = capsys.readouterr().out
    assert "optimizer step of the actor skipped: its gradients are not finite" in text
    assert "alarm after step 1: skipped_steps is 1, above 0" in text
    assert "every optimizer step was skipped" in text
    assert world.is_unmoved(before)


def test_a_critic_that_is_not_finite_ends_the_step_by_name(build_world):
    world = build_world(max_steps=1, with_critic=True, advantage_estimator="gae")
    stage = world.trainer.stage
    critic, update = world.strategy.unwrap_model(stage.models.named("critic").model), stage.update

    def spoil(batch, step):
        work = update(batch, step)
        with torch.no_grad():
            critic.value_head.weight[0, 0] = math.inf
        return work

    stage.update = spoil
    with pytest.raises(NonFiniteError, match=r"after step 1 weights are not finite: value_head"):
        world.trainer.fit()


def test_logprobs_that_are_not_finite_are_counted(build_world, capsys):
    world = build_world(max_steps=1, with_reference=True, use_kl_loss=True, parity_check_steps=-1)
    with torch.no_grad():
        next(world.trainer.stage.maker.models.reference.parameters()).fill_(math.nan)
    found = " ".join(one_step(world, capsys))
    assert "nonfinite/logprobs is" in found
    assert "nonfinite/losses is" in found
    assert "not finite: kl" in found


@pytest.mark.full
def test_stop_on_alarm_ends_a_run_with_its_code_and_all_its_files(tmp_path, tiny_model, capsys):
    write_inputs(tmp_path, reward="def score(responses): return [1.0] * len(responses)\n")
    run = tmp_path / "run"
    options = rollout_options(tmp_path, pretrain=tiny_model, stop_on_alarm=True)
    with pytest.raises(RunAlarmError, match="all rewards are equal") as caught:
        train(options)
    assert exit_code_of(caught.value) == ExitCode.NUMERICS
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_steps"] == 1
    assert summary["verdict"].startswith("no update: 1 of 1 steps: the gradient was 0")
    assert "ended by an alarm: all rewards are equal (mean 1)" in summary["verdict"]
    assert summary["verdict"] in capsys.readouterr().out
    assert (run / "model/config.json").is_file()
    page = render_report(run)
    assert "no update: 1 of 1 steps: the gradient was 0" in page
    assert any("zero_gradient_share" in line for line in find_alarms(read_run(run)))
