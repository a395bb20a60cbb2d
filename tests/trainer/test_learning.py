"""The whole chain learns: a reward that can only rise if every sign and pairing is right."""

import pytest
from tests.runs import TextReward


def odd_bytes(text):
    """Share of odd characters: about one half before training."""
    return sum(ord(c) % 2 for c in text) / max(len(text), 1)


class Shuffled(TextReward):
    """Negative control: the rewards belong to other responses."""

    def score(self, *rows):
        results = super().score(*rows)
        return [*results[5:], *results[:5]]


def rise(build_world, reward, **options):
    world = build_world(
        reward=reward,
        num_prompts=96,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        train_batch_size=32,
        micro_train_batch_size=32,
        generate_max_len=8,
        loss_agg_mode="token-mean",
        args={"train_batch_size": 32, "rollout_batch_size": 8, "actor_learning_rate": 3e-3},
        **options,
    )
    values = [world.step()["reward"] for _ in range(8)]
    return values[-1] - values[0]


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce++", "cpgd", "gae"])
def test_reward_rises(build_world, estimator):
    critic = {"with_critic": True, "lambd": 1.0} if estimator == "gae" else {}
    assert rise(build_world, TextReward(odd_bytes), advantage_estimator=estimator, **critic) > 0.2


@pytest.mark.parametrize(
    "older", [{"rollout_lag": 1}, {"rollout_lag": 2}, {"stream_chunk": 5}], ids=str
)
def test_reward_rises_on_rows_of_older_weights_too(build_world, older):
    assert rise(build_world, TextReward(odd_bytes), **older) > 0.15


def test_reward_of_another_response_teaches_nothing(build_world):
    assert rise(build_world, Shuffled(odd_bytes)) < 0.15
