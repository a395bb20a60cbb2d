import argparse
from dataclasses import fields

import pytest

from lightrft.strategy.config import StrategyConfig
from lightrft.utils import add_arguments

GUIDE_RECIPES = (
    "--zero_stage 2 --engine_tp_size 4 --engine_mem_util 0.9 --enable_engine_sleep "
    "--micro_train_batch_size 1 --train_batch_size 128",
    "--fsdp --fsdp_cpu_offload --use_mp_opt --engine_tp_size 2 --engine_mem_util 0.85 "
    "--enable_engine_sleep --micro_train_batch_size 1 --train_batch_size 64",
    "--fsdp --engine_tp_size 4 --mixed_mm_data --packing_samples --enable_engine_sleep "
    "--plot_every 20",
    "--engine_type vllm --disable_engine_sleep --adam_offload --sp_size 2 --fused_linear_logprob "
    "--chunk_size 4096 --log_dir ./logs --plot_every 10 --bf16",
)


def parse(text, **options):
    return add_arguments(argparse.ArgumentParser(), **options).parse_args(text.split())


@pytest.mark.parametrize("recipe", GUIDE_RECIPES)
def test_recipes_of_the_guide_parse(recipe):
    config = StrategyConfig.from_args(parse(recipe))
    assert not config.extra_args


def test_flags_the_parser_has_are_left_alone():
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero_stage", type=int, default=3)
    parser.add_argument("--my_fsdp", dest="fsdp", action="store_true")
    args = add_arguments(parser).parse_args([])
    assert args.zero_stage == 3
    assert "--fsdp " not in parser.format_help()
    assert "--fsdp_cpu_offload" in parser.format_help()


def test_every_field_can_be_a_flag_and_round_trips():
    args = parse("--adam_betas 0.8 0.9 --critic_pretrain /c --max_len 7", names=None)
    config = StrategyConfig.from_args(args)
    assert config.adam_betas == (0.8, 0.9)
    assert (config.critic_pretrain, config.max_len) == ("/c", 7)
    missing = {e.name for e in fields(StrategyConfig)} - set(vars(args))
    assert missing == {"extra_args", "explicit", "engine_args", "learning_rate_factors"}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="zero_stge"):
        add_arguments(argparse.ArgumentParser(), names=["zero_stge"])
