"""A trainer built in a script: reward models as they are, and options that reach the models."""

import pytest
import torch
from tests.runs import TextReward


class LongIsGood(torch.nn.Module):
    """Scores the sampled ids by their number."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, token_ids, attention_mask):
        return self.factor * attention_mask.float().sum(-1)


def rewards_of(world):
    batch = world.trainer.make_experience(world.prompts[:4])
    return batch, batch.rollouts.attention_mask.float().sum(-1)


def test_a_module_is_a_reward(build_world):
    batch, lengths = rewards_of(build_world(reward=LongIsGood()))
    torch.testing.assert_close(batch.rollouts.rewards.float(), lengths)
    assert len(batch.rollouts.rewards.unique()) > 1


def test_a_list_of_modules_and_functions_is_their_sum(build_world):
    world = build_world(reward=[LongIsGood(), LongIsGood(0.5), TextReward(lambda _: 10)])
    batch, lengths = rewards_of(world)
    torch.testing.assert_close(batch.rollouts.rewards.float(), 1.5 * lengths + 10)


def test_what_cannot_score_is_named(build_world):
    with pytest.raises(TypeError, match=r"nn.Module or have score.*got int"):
        build_world(reward=[3])


@pytest.mark.full
def test_options_reach_models_that_a_script_built(build_world):
    plain, fused = (
        build_world(
            args={
                "fused_linear_logprob": is_fused,
                "chunk_size": 7,
                "gradient_checkpointing": is_fused,
            }
        )
        for is_fused in (False, True)
    )
    heads = [world.actor.model.get_output_embeddings() for world in (plain, fused)]
    assert [head.is_fused for head in heads] == [False, True]
    assert "chunk_columns=7" in repr(heads[1].workspace)
    for world, is_on in ((plain, False), (fused, True)):
        assert world.actor.is_gradient_checkpointing == is_on
    losses = []
    for world in (plain, fused):
        world.trainer.make_experience(world.prompts[:4])
        losses.append(world.trainer.ppo_train(1)["policy_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_loss_that_couples_rows_is_said_and_is_no_option_without_effect(build_world, capsys):
    build_world(policy_loss="kl_cov")
    text = capsys.readouterr().out
    assert "warning: policy_loss kl_cov couples rows of a micro-batch" in text
    assert "option without effect: policy_loss" not in text
