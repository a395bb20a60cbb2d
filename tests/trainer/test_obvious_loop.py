"""The trainer against a loop over its parts, bit for bit, with rows of older weights."""

import pytest

from lightrft.experience.delivery import Delivery
from lightrft.experience.maker import AdvantageSettings, make_experience
from lightrft.rollout.source import InFlight
from lightrft.stages.policy.maker import PolicyBatch

pytestmark = pytest.mark.full


def obvious_loop(world, lag, num_steps):
    """Carry out "sample t + lag, then train t"."""
    trainer, strategy = world.trainer, world.strategy
    maker, stage = trainer.stage.maker, trainer.stage
    waiting, num_sampled = [], 0
    for number in range(1, num_steps + 1):
        under_way = trainer.loop.next_step()
        trainer.loop.prepare_to_draw()
        while num_sampled < number + lag:
            waiting.append(
                maker.sampler.collect(
                    under_way.data.next_batch(),
                    first_request_id=4 * num_sampled,
                    timer=under_way.timer,
                    step=number,
                )
            )
            num_sampled += 1
        for name in ("idle_seconds", "thin_seconds"):
            under_way.metrics.add_mean(name, 0.0, 1.0)
        strategy.sleep_until_weight_sync()
        experience = make_experience(
            waiting.pop(0),
            maker.models,
            delivery=Delivery(strategy.context),
            engine=strategy.inference_engine,
            settings=AdvantageSettings(
                trainer.config, maker.algorithm.estimator, moments=stage.memory.moments
            ),
            step=number - 1,
            timer=under_way.timer,
            reuses_policy_logprobs=maker.reuses_policy_logprobs(under_way),
        )
        trainer.pending = under_way, PolicyBatch(experience, InFlight(), 1)
        trainer.ppo_train(number)
    return world


@pytest.mark.parametrize("lag, num_steps", [(0, 20), (1, 6), (2, 6)])
def test_the_trainer_is_the_obvious_loop_bit_for_bit(build_world, lag, num_steps):
    options = {
        "num_prompts": 16,
        "reward_running_norm": True,
        "args": {"train_batch_size": 8, "parity_check_steps": -1},
        "rollout_lag": lag,
    }
    expected = obvious_loop(build_world(**options), lag, num_steps).weights()
    world = build_world(**options)
    for _ in range(num_steps):
        world.step()
    assert world.is_unmoved(expected)
