"""Learning rates that nobody gave."""

import pytest

from lightrft.config import TrainConfig
from lightrft.config.parts.training import LEARNING_RATES, default_learning_rate
from lightrft.config.registry import STAGES


def test_each_stage_has_its_rates_and_others_have_those_of_reinforcement():
    assert set(LEARNING_RATES) <= set(STAGES)
    assert [default_learning_rate("sft", has_adapters=has) for has in (False, True)] == [1e-5, 1e-4]
    for stage in ("policy", "my_stage.py:read_inputs"):
        assert default_learning_rate(stage, has_adapters=True) == 1e-6


@pytest.mark.parametrize("given, rate", [(None, 1e-6), (0.0, 0.0), (3e-4, 3e-4)])
def test_a_strategy_without_a_stage_takes_what_was_given_or_that_of_reinforcement(given, rate):
    assert TrainConfig(actor_learning_rate=given).peak_learning_rate == rate
