"""Values come from the hidden state before each token, zero at first."""

import pytest
import torch
from tests.models.all_types import types
from transformers import AutoModel

from lightrft.models import Critic, ModelLoadError
from lightrft.models.reward_model import RewardModel
from lightrft.strategy.meta_init import parameters_on_meta


def make_batch():
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 256, (2, 9), generator=generator)
    return token_ids, torch.arange(9) < torch.tensor([[9], [5]])


def randomise_head(critic):
    torch.manual_seed(3)
    with torch.no_grad():
        critic.value_head.weight.normal_()
        critic.value_head.bias.fill_(0.5)


def test_values_are_zero_at_first_but_learn(checkpoint):
    critic = Critic.from_pretrained(checkpoint)
    values = critic(*make_batch())
    assert not values.any()
    values.sum().backward()
    assert critic.value_head.weight.grad.abs().sum() > 0


def test_value_before_token_t_sees_only_the_tokens_before_it(checkpoint):
    token_ids, attention_mask = make_batch()
    critic = Critic.from_pretrained(checkpoint)
    randomise_head(critic)
    values = critic(token_ids, attention_mask)
    assert values.dtype == torch.float32
    assert not values[:, 0].any()
    assert not values[~attention_mask].any()
    trunk = AutoModel.from_pretrained(checkpoint)
    for row, length in ((0, 9), (1, 5)):
        hidden = trunk(token_ids[row : row + 1, :length]).last_hidden_state[0]
        expected = hidden @ critic.value_head.weight[0] + 0.5
        assert torch.allclose(values[row, 1:length], expected[:-1], atol=1e-5)
    changed = token_ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 256
    moved = (critic(changed, attention_mask) != values)[0]
    assert not moved[:5].any()
    assert moved[5:].all()


def test_save_and_load_keeps_the_value_head(checkpoint, tmp_path):
    critic = Critic.from_pretrained(checkpoint)
    randomise_head(critic)
    critic.save_pretrained(tmp_path)
    loaded = Critic.from_pretrained(str(tmp_path))
    states = zip(loaded.state_dict().values(), critic.state_dict().values(), strict=True)
    assert all(torch.equal(value, written) for value, written in states)
    torch.testing.assert_close(loaded(*make_batch()), critic(*make_batch()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("model_type", ["gpt_neox", "rwkv", "qwen3"])
def test_output_layers_of_any_name_stay_in_the_file(model_type, on_meta, tmp_path):
    types.tiny_model(model_type).save_pretrained(tmp_path)
    with parameters_on_meta(on_meta):
        Critic.from_pretrained(str(tmp_path))
        if model_type != "rwkv" and not on_meta:  # without classifiers, or memory for new weights
            RewardModel.with_new_head(str(tmp_path), seed=0)


def test_a_type_without_a_trunk_is_refused(tmp_path):
    types.tiny_model("llama4").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="without its output layer"):
        Critic.from_pretrained(str(tmp_path))
