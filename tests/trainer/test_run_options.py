"""Options of a run, each with its effect: freezing, averages, alarms, bounds, trajectories."""

import pytest
from tests.models.batches import copies, relative_norm
from tests.runs import lines

from lightrft.config import TrainConfig
from lightrft.models.actor import Actor
from lightrft.reporting.alarms import alarms
from lightrft.reporting.trajectories import TrajectoryLog
from lightrft.stages.policy.inputs import build_models
from lightrft.strategy import get_fake_strategy


def test_the_actor_is_frozen_at_first_while_the_critic_learns(build_world):
    world = build_world(with_critic=True, advantage_estimator="gae", freezing_actor_steps=1)
    start = world.weights()
    critic = copies(world.trainer.critic)
    metrics = world.step()
    assert world.is_unmoved(start)
    assert relative_norm(copies(world.trainer.critic), critic) > 0
    assert "policy_loss" not in metrics
    assert "critic_loss" in metrics
    assert "policy_loss" in world.step()
    assert not world.is_unmoved(start)


def test_the_schedule_of_a_frozen_actor_has_only_the_steps_it_takes(tiny_model):
    config = TrainConfig(
        pretrain=tiny_model,
        advantage_estimator="gae",
        freezing_actor_steps=2,
        max_epochs=3,
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        train_batch_size=8,
        lr_scheduler="linear",
        lr_warmup_ratio=0.0,
    )
    training = get_fake_strategy(config).training
    models, _ = build_models(config, training, 10 * config.steps_per_rollout)
    rates = {}
    for trained, num_steps in zip(models.trained, (8 * 6, 10 * 6), strict=True):
        for _ in range(num_steps - 1):
            trained.optimizer.step()
            trained.scheduler.step()
        rates[trained.name] = trained.scheduler.get_last_lr()[0]
    peaks = {"actor": config.peak_learning_rate, "critic": config.critic_learning_rate}
    for name, num_steps in (("actor", 48), ("critic", 60)):
        assert rates[name] == pytest.approx(peaks[name] / num_steps)


def test_the_average_follows_the_actor(build_world, tiny_model):
    average = Actor.from_pretrained(tiny_model)
    before = copies(average)
    world = build_world(ema_model=average, ema_beta=0.75)
    world.step()
    # Two optimizer steps; the weights after the first are not seen, so only bounds are checked.
    actor = dict(world.actor.named_parameters())
    for name, value in average.named_parameters():
        moved = (value - before[name]).norm()
        assert 0 < moved < (actor[name] - before[name]).norm(), name


def test_the_kl_weight_adapts(build_world):
    world = build_world(with_reference=True, use_kl_loss=True, kl_target=1e-9, kl_horizon=100)
    values = [world.step()["kl_coef"] for _ in range(3)]
    assert values[0] == pytest.approx(0.1)
    # The first KL is 0, far below any target; the second is above: 16 samples, 20 % per 100.
    assert values[1] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))
    assert values[2] == pytest.approx(values[1] * (1 + 0.2 * 16 / 100))


def test_bounds_of_alarms():
    config = TrainConfig(alarm_kl=0.1, alarm_entropy=0.5, alarm_length=10, alarm_reward_std=0.01)
    fine = {"kl": 0.1, "entropy": 0.5, "response_length": 10, "reward_std": 0.01, "approx_kl": 0}
    assert alarms(config, fine) == []
    wrong = {"kl": 0.2, "entropy": 0.4, "response_length": 11, "reward_std": 0, "approx_kl": 1}
    assert [text.split()[0] for text in alarms(config, wrong)] == [
        "kl",
        "approx_kl",
        "response_length",
        "entropy",
        "reward_std",
    ]
    assert alarms(config, {}) == []
    assert alarms(TrainConfig(), wrong) == []
    (text,) = alarms(TrainConfig(), {**wrong, "correction_invalid_share": 0.01})
    assert text == "correction_invalid_share is 0.01, above 0"


@pytest.mark.parametrize("stops, steps", [(False, 2), (True, 1)])
def test_an_alarm_warns_and_stops_only_if_told_to(build_world, capsys, stops, steps):
    world = build_world(alarm_length=0.5, stop_on_alarm=stops, max_steps=2)
    assert world.trainer.fit().num_steps == steps
    assert capsys.readouterr().out.count("alarm after step") == steps


@pytest.mark.full
def test_trajectories_hold_one_value_per_token(build_world, tmp_path):
    log = TrajectoryLog(tmp_path / "t.jsonl", num_samples=3, every=2)
    world = build_world(
        trajectory_log=log,
        train_batch_size=16,
        with_critic=True,
        with_reference=True,
        use_kl_loss=True,
    )
    for step in range(4):
        batch = world.trainer.make_experience()
        assert (batch.outputs.old_logprobs is None) == (step == 2)
        table = world.experience.table
        world.trainer.ppo_train(step + 1)
    written = lines(tmp_path / "t.jsonl")
    assert [line["step"] for line in written] == [1] * 3 + [2] * 3 + [4] * 3
    for line in written[6:]:
        row = table.sample_ids.tolist().index(line["sample_id"])
        count = int(table.response_lengths[row])
        per_token = (
            "token_ids tokens logprobs rollout_logprobs ref_logprobs entropy values advantages "
            "returns"
        )
        for name in per_token.split():
            assert len(line[name]) == count, name
        assert line["logprobs"] == pytest.approx(line["rollout_logprobs"], abs=1e-3)
        assert line["reward"] == pytest.approx(table.rewards[row])
        assert set(line["components"]) == {"vowels", "lower"}
