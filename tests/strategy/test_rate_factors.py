"""Which learning rate a part of a model gets."""

import pytest
from torch import nn
from torch.optim import AdamW

from lightrft.config import ConfigError, StrategyConfig
from lightrft.strategy.fake import get_fake_strategy
from lightrft.strategy.optimizers import parameter_groups, rate_factor, with_rate_factors

FACTORS = {r"visual\.merger": 2.0, "visual": 0.1, "lora_B": 16.0}


@pytest.mark.parametrize(
    "name, factor",
    [
        ("model.model.visual.blocks.0.attn.weight", 0.1),
        ("model.model.visual.merger.mlp.weight", 2.0),
        ("visual.weight", 0.1),
        ("model.visual_projection.weight", 1.0),
        ("model.layers.0.q_proj.lora_B.default.weight", 16.0),
        ("model.layers.0.q_proj.lora_A.default.weight", 1.0),
    ],
)
def test_the_first_pattern_of_whole_parts_counts(name, factor):
    assert rate_factor(name, FACTORS) == factor


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(2, 2), nn.Linear(2, 2)
        self.is_actor = True


def test_groups_have_one_rate_and_one_decay_each():
    pair = Pair()
    groups = parameter_groups(pair.named_parameters(), 0.1)
    assert with_rate_factors(groups, pair.named_parameters(), 1e-3, {}) is groups
    split = with_rate_factors(groups, pair.named_parameters(), 1e-3, FACTORS)
    assert [(g["weight_decay"], g["lr"], g["rate_factor"]) for g in split] == [
        (0.1, 1e-3, 1.0),
        (0.1, pytest.approx(1e-4), 0.1),
        (0.0, 1e-3, 1.0),
        (0.0, pytest.approx(1e-4), 0.1),
    ]
    own = [id(p) for g in split for p in g["params"]]
    assert sorted(own) == sorted(id(p) for p in pair.parameters())
    assert [id(p) for p in split[1]["params"]] == [id(pair.visual.weight)]


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"visual": 0.1, "audio": 0.1},
            "no trained weight has 'audio' as a part of its name; there are visual, weight, bias",
        ),
        (
            {"visual|text": 0.1, "bias": 2.0, r"text\.weight": 3.0},
            r"'bias' has no effect, since earlier patterns take all its weights "
            r"\('visual\|text' that of visual.bias\): put it before",
        ),
    ],
)
def test_a_factor_for_no_weight_is_refused(given, message):
    with get_fake_strategy({"learning_rate_factors": given}) as strategy:
        with pytest.raises(ConfigError, match=message):
            strategy.prepare_models_and_optimizers(Pair(), None, None, None, None, 3)
        with pytest.raises(ConfigError, match=message):
            strategy.prepare_reward_model(Pair())


def test_a_checkpoint_of_other_parts_says_that_factors_may_only_change_their_numbers(tmp_path):
    from lightrft.strategy.checkpoints.files import FileWriter
    from lightrft.strategy.checkpoints.training_state import load_optimizer, save_optimizer
    from lightrft.strategy.distributed.process_end import CheckpointError

    pair = Pair()

    def optimizer(factors):
        groups = parameter_groups(pair.named_parameters(), 0.1)
        return AdamW(with_rate_factors(groups, pair.named_parameters(), 1e-3, factors))

    (tmp_path / "optimizer").mkdir()
    save_optimizer(tmp_path, pair, optimizer({"visual": 0.1}), FileWriter(), rank=0)
    load_optimizer(tmp_path, pair, optimizer({"visual": 3.0}))
    with pytest.raises(CheckpointError, match="learning_rate_factors of the same parts"):
        load_optimizer(tmp_path, pair, optimizer({r"visual\.weight": 0.1}))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"visual": 0}, "visual=0, expected a number above 0; freeze_prefix keeps"),
        ({"visual": -1.0}, "expected a number above 0"),
        ({"visual": "slow"}, "visual='slow', expected a number"),
        ({"(": 0.5}, r"'\(' is no regular expression"),
    ],
)
def test_factors_are_numbers_above_0_by_regular_expressions(given, message):
    with pytest.raises(ConfigError, match=message):
        StrategyConfig(learning_rate_factors=given)
