"""What a run looks for before it reads weights."""

import pytest
from tests.runs import rollout_options, say_rows, write_inputs

from lightrft.config import TrainConfig
from lightrft.stages.policy.inputs import read_inputs
from lightrft.strategy.config import ConfigError


@pytest.fixture
def options(tmp_path, tiny_model):
    write_inputs(tmp_path, say_rows(12), reward="def score(responses):\n    return [0.0]\n")
    return lambda **changes: rollout_options(tmp_path, "run", pretrain=tiny_model, **changes)


def test_layers_for_adapters_are_looked_for_before_weights_are_read(options):
    wrong = options(lora_rank=4, target_modules=("foo",))
    with pytest.raises(ConfigError, match=r"no linear layer is called foo; the model has .*q_proj"):
        read_inputs(TrainConfig(**wrong))


def test_fewer_prompts_than_a_step_takes_are_refused(options):
    few = options(rollout_batch_size=16, train_batch_size=16)
    with pytest.raises(ConfigError, match="12 usable prompts"):
        read_inputs(TrainConfig(**few))
