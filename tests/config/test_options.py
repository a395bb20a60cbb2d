"""What an option declares is what is checked, shown, saved and hidden."""

import math
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightrft.cli.options import merge_options
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import (
    alternatives,
    check_value,
    coerce,
    looks_secret,
    option,
    options_of,
    part,
    type_hints,
)
from lightrft.config.strategy_config import StrategyConfig
from lightrft.utils.arguments import from_text

HINTS = type_hints(TrainConfig)
MAPPINGS = [n for n in HINTS if Mapping in map(typing.get_origin, alternatives(HINTS[n]))]


@part("data")
class Example:
    share: float = option(0.5, "A share.", at_least=0, at_most=1)
    limit: float = option(1.0, "A limit.", above=0, finite=False)
    names: tuple[str, ...] = option((), "Names.", choices=("a", "b"))


@pytest.mark.parametrize(
    "name, hint, value, message",
    [
        ("share", float, 0.3, None),
        ("share", float, 1.5, "<= 1"),
        ("share", float, math.nan, "a finite number"),
        ("share", float, math.inf, "a finite number"),
        ("share", float, "half", "expected float"),
        ("limit", float, math.inf, None),
        ("limit", float, math.nan, "a number"),
        ("limit", float, 0.0, "> 0"),
        ("names", tuple[str, ...], ("a", "b"), None),
        ("names", tuple[str, ...], ("a", "c"), "got 'c', expected one of"),
    ],
)
def test_a_value_is_right_or_named_with_what_is_expected(name, hint, value, message):
    found = check_value(name, value, hint, options_of(Example)[name][1])
    assert found is None if message is None else message in found


@pytest.mark.parametrize("hint", [int, int | None, tuple[int, ...] | None], ids=str)
def test_a_whole_number_may_be_a_float_where_a_count_is_wanted(hint):
    whole, half = (2.0, 2.5) if hint in (int, int | None) else ([2.0, 3], [2.5])
    kept, odd = coerce(whole, hint), coerce(half, hint)
    assert repr(kept) in ("2", "(2, 3)")
    assert odd in (2.5, (2.5,))
    assert coerce(math.inf, int) == math.inf


def test_paths_become_texts():
    assert coerce(Path("a/b"), str | None) == "a/b"
    assert coerce([Path("a"), "b"], tuple[str, ...]) == ("a", "b")
    assert coerce(Path("a"), tuple[str, ...]) == ("a",)


def test_whole_floats_of_files_and_calls_are_counts(tmp_path):
    (tmp_path / "a.toml").write_text("num_train_epochs = 2.0\ntrain_batch_size = 4.5\n")
    config, (problem,) = merge_options([tmp_path / "a.toml"], {}, "sft")
    assert repr(config.max_epochs) == "2"
    assert problem == "train_batch_size: got 4.5 (float), expected int"
    called = TrainConfig().replaced({"num_train_epochs": 2.0}, "sft")
    assert repr(called.max_epochs) == "2"


def test_an_option_that_acts_with_another_names_it():
    assert (
        TrainConfig(fsdp=True, zpg=2).unused_options()[0].startswith("zpg acts only without fsdp")
    )
    assert TrainConfig(ema_beta=0.5).unused_options() == ["ema_beta acts only with enable_ema"]
    assert TrainConfig(ema_beta=0.5, enable_ema=True).unused_options() == []
    constant = TrainConfig(lr_scheduler="constant", min_lr_ratio=0.5)
    assert constant.unused_options() == [
        "min_lr_ratio acts only with lr_scheduler cosine_with_min_lr"
    ]


def test_conditions_name_options_that_exist():
    known = options_of(TrainConfig)
    for name, (_, info) in known.items():
        condition = (info.acts_with or name).removeprefix("not ").split(" ")[0]
        assert condition in known or info.acts_with == "a critic" or info.acts_when, name


@pytest.mark.parametrize("name", ["hf_token", "wandb_api_key", "db_password", "aws_secret", "KEY"])
def test_names_of_secrets_are_recognised(name):
    assert looks_secret(name)


def test_no_option_of_the_record_is_taken_for_a_secret_by_its_name():
    secret = {name for name, (_, info) in options_of(TrainConfig).items() if info.secret}
    assert secret == {"use_wandb", "remote_rm_token"}
    assert not any(map(looks_secret, ("input_key", "label_key", "images_key", "max_new_tokens")))


def test_a_strategys_configuration_becomes_the_record_of_a_run_and_keeps_what_it_does_not_know():
    strategy = StrategyConfig.from_args({"temperature": 0.5, "seed": 7, "my_own": 3})
    config = TrainConfig.from_args(strategy)
    assert (config.temperature, config.seed, config.extra_args) == (0.5, 7, {"my_own": 3})
    assert TrainConfig.from_args(config) == config
    assert StrategyConfig.from_args(config) is not config


def test_replaced_checks_names_and_values():
    config = TrainConfig(seed=3)
    assert config.replaced({"gamma": 0.5}).gamma == 0.5
    assert config.gamma == 1.0
    with pytest.raises(TypeError, match="no option 'gama'; did you mean gamma"):
        config.replaced({"gama": 0.5})
    with pytest.raises(ConfigError, match="gamma: got 2"):
        config.replaced({"gamma": 2})


def test_options_of_a_run_with_the_former_kl_term_are_read(tmp_path):
    """Programs beside training read them; a new run is refused."""
    (tmp_path / "config.toml").write_text('init_kl_coef = 0.01\nkl_estimator = "k3"\n')
    assert TrainConfig.load(tmp_path / "config.toml").kl_estimator_name == "k3"


def test_unset_is_told_apart_from_a_value_that_equals_a_default():
    from lightrft.stages.policy.algorithm import decide

    unset, _ = decide(TrainConfig(policy_loss="gspo"))
    given, algorithm = decide(TrainConfig(policy_loss="gspo", eps_clip=0.2))
    assert (unset.eps_clip, given.eps_clip) == (None, 0.2)
    assert algorithm.policy_loss.keywords == {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize("name", sorted(MAPPINGS))
@pytest.mark.parametrize(
    "items",
    [
        ['{"components": "correct,format=0.5", "b": 1.5, "c": true}'],
        ["components=correct,format=0.5", "b=1.5", "c=true"],
        ['{"components": "correct,format=0.5"}', "b=1.5", '{"c": true}'],
    ],
)
def test_mapping_options_take_pairs_and_json(name, items):
    expected = {"components": "correct,format=0.5", "b": 1.5, "c": True}
    assert from_text(items, HINTS[name]) == expected


def test_a_text_that_is_no_mapping_says_how_to_write_one():
    with pytest.raises(ConfigError, match=r"judge_args: .*: write NAME=VALUE, or a JSON object"):
        TrainConfig(judge_args=from_text(['{"input": 0.5'], HINTS["judge_args"]))
