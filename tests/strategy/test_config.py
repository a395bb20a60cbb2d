import argparse
from dataclasses import dataclass

import pytest

from lightrft.strategy.config import ConfigError, StrategyConfig, option


def test_from_args_keeps_unknown_names_whatever_the_form():
    given = {"seed": 7, "fsdp": True, "prompt_key": "question", "reward": [1, 2]}
    from_mapping = StrategyConfig.from_args(given)
    from_namespace = StrategyConfig.from_args(argparse.Namespace(**given))
    assert from_mapping == from_namespace
    assert (from_mapping.seed, from_mapping.fsdp) == (7, True)
    assert from_mapping.extra_args == {"prompt_key": "question", "reward": [1, 2]}


def test_from_args_of_a_configuration_loses_nothing_and_is_a_copy():
    first = StrategyConfig.from_args({"zero_stage": 3, "custom": 1})
    second = StrategyConfig.from_args(first)
    assert second == first
    second.extra_args["custom"] = 2
    second.local_rank = 5
    assert first.extra_args == {"custom": 1}
    assert first.local_rank == -1


def test_subclass_fields_survive_and_extras_become_fields():
    @dataclass(kw_only=True)
    class Wider(StrategyConfig):
        eps_clip: float = option(0.2, "Clip range.", group="algorithm", at_least=0)

    base = StrategyConfig.from_args({"eps_clip": 0.3, "other": 1})
    wide = Wider.from_args(base)
    assert (wide.eps_clip, wide.extra_args) == (0.3, {"other": 1})
    assert isinstance(StrategyConfig.from_args(wide), Wider)
    assert StrategyConfig.from_args(wide).get_extra_arg("eps_clip") == 0.3
    with pytest.raises(ConfigError, match="eps_clip"):
        Wider(eps_clip=-1.0)


def test_none_means_the_default_where_a_field_cannot_be_none():
    config = StrategyConfig.from_args({"train_batch_size": None, "remote_rm_url": None})
    assert (config.train_batch_size, config.remote_rm_url) == (128, None)


def test_lists_and_ints_from_parsers_fit_tuples_and_floats():
    config = StrategyConfig.from_args({"adam_betas": [0, 0.5], "max_norm": 2})
    assert config.adam_betas == (0, 0.5)
    assert isinstance(config.max_norm, float)


def test_disable_engine_sleep_is_understood():
    assert StrategyConfig.from_args({"disable_engine_sleep": True}).enable_engine_sleep is False


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="Namespace, a mapping or a StrategyConfig, got int"):
        StrategyConfig.from_args(3)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("seed", -1, ">= 0"),
        ("seed", True, "expected int"),
        ("micro_train_batch_size", 0, ">= 1"),
        ("engine_mem_util", 1.5, "<= 1"),
        ("engine_mem_util", 0.0, "> 0"),
        ("engine_type", "vlm", "did you mean 'vllm'"),
        ("zero_stage", 4, "one of [0, 1, 2, 3]"),
        ("adam_betas", (0.9, 1.0), "[0, 1)"),
        ("adam_betas", (0.9,), "tuple"),
        ("bf16", "yes", "bool | None"),
        ("max_norm", "1", "expected float"),
        ("timeout_minutes", 0, "> 0"),
    ],
)
def test_wrong_value_is_named(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        StrategyConfig(**{name: value})
    assert name in str(caught.value)
    assert expected in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        StrategyConfig(seed=-3, zero_stage=9, engine_mem_util=7.0)
    assert all(name in str(caught.value) for name in ("seed", "zero_stage", "engine_mem_util"))


def test_get_extra_arg():
    config = StrategyConfig.from_args({"prompt_key": "q"})
    assert config.get_extra_arg("prompt_key") == "q"
    assert config.get_extra_arg("missing", default=None) is None
    assert config.get_extra_arg("missing", 5) == 5
    assert config.get_extra_arg("seed") == 42
    with pytest.raises(KeyError, match="prompt_key"):
        config.get_extra_arg("promt_key")


def test_summary_shows_changes_and_hides_secrets(capsys):
    config = StrategyConfig.from_args(
        {
            "seed": 7,
            "remote_rm_url": "http://user:hunter2@host/rm",
            "use_wandb": "abc123",
            "hf_token": "hf_abc123",
            "nested": {"api_key": "abc123", "size": 3},
            "input_key": "question",
            "max_new_tokens": 99,
        }
    )
    config.print_config_summary()
    text = capsys.readouterr().out
    assert "* seed = 7" in text
    assert "  max_norm = 1.0" in text
    assert "abc123" not in text
    assert "hunter2" not in text
    assert "question" in text
    assert "99" in text
    assert "size: 3" in text
    assert "abc123" not in repr(config)


def test_options_without_effect_are_listed():
    assert StrategyConfig().unused_options() == []
    idle = StrategyConfig(use_mp_opt=True, fsdp_cpu_offload=True).unused_options()
    assert len(idle) == 2
    assert all("fsdp" in text for text in idle)
    assert StrategyConfig(fsdp=True, use_mp_opt=True).unused_options() == []


def test_precision_follows_the_device_unless_set():
    assert StrategyConfig().computes_in_bf16(has_gpu=True)
    assert not StrategyConfig().computes_in_bf16(has_gpu=False)
    assert StrategyConfig(bf16=True).computes_in_bf16(has_gpu=False)
