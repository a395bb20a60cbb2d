"""The whole chain learns: a reward that can only rise if every sign and pairing is right."""

import pytest

from lightrft.rewards.types import RewardResult


class OddBytes:
    """Share of odd characters: about one half before training."""

    name = "odd"
    needs_labels = False

    def score(self, prompts, responses, labels, columns):
        return [
            RewardResult(sum(ord(c) % 2 for c in text) / max(len(text), 1)) for text in responses
        ]

    def close(self):
        pass


class Shuffled(OddBytes):
    """Negative control: the rewards belong to other responses."""

    def score(self, prompts, responses, labels, columns):
        results = super().score(prompts, responses, labels, columns)
        return [*results[5:], *results[:5]]


def rise(build_world, reward, **options):
    world = build_world(
        reward=reward,
        num_prompts=64,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        train_batch_size=32,
        micro_train_batch_size=32,
        generate_max_len=8,
        loss_agg_mode="token-mean",
        args={"train_batch_size": 32, "rollout_batch_size": 8, "actor_learning_rate": 3e-3},
        **options,
    )
    values = []
    for step in range(8):
        world.trainer.make_experience()
        values.append(world.trainer.ppo_train(step)["reward"])
    return values[-1] - values[0]


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce++", "cpgd", "gae"])
def test_reward_rises(build_world, estimator):
    critic = {"with_critic": True, "lambd": 1.0} if estimator == "gae" else {}
    assert rise(build_world, OddBytes(), advantage_estimator=estimator, **critic) > 0.2


def test_reward_of_another_response_teaches_nothing(build_world):
    assert rise(build_world, Shuffled()) < 0.15
