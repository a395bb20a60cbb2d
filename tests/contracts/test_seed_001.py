"""The strategy usage guide, reStructuredText form: tables, flags, recipes, notes and advice.

It has the text of seed 000, whose Python blocks test_seed_000 runs. Here every other promise is
quoted. Its recipes run for real in tests/integration/test_recipes.py.
"""

import argparse
import importlib
import shlex

import pytest
import torch
from tests.contracts.recipes import RECIPES
from tests.engines.fake_engine import FakeEngine

from lightrft.engines.types import EngineConfig
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.process_groups import check_divides, engine_group_ranks
from lightrft.utils import add_arguments

FLAGS = """
    --engine_tp_size 4              # Tensor parallelism size for inference engine
    --engine_mem_util 0.85          # GPU memory utilization for KV cache (0.0-1.0)
    --engine_type vllm              # Engine type: 'vllm' or 'sglang'
    --enable_engine_sleep           # Enable engine sleep mode (default: True)
    --disable_engine_sleep          # Disable engine sleep mode
    --fsdp                          # Use FSDP instead of DeepSpeed
    --zero_stage 2                  # DeepSpeed ZeRO stage (1, 2, or 3)
    --fsdp_cpu_offload              # Offload FSDP optimizer states to CPU
    --adam_offload                  # Offload Adam optimizer states
    --sp_size 2                     # Sequence parallelism size
    --packing_samples               # Pack multiple samples into sequences
    --use_mp_opt                    # Use mixed precision optimizer (FSDP)
    --fused_linear_logprob          # Fused linear layer and logprob computation
    --chunk_size 4096               # Chunk size for fused operations
    --log_dir ./logs                # Directory for logs and visualizations
    --plot_every 10                 # Plot generation length distribution every N steps
    --sp_size 4  # Split sequence across 4 GPUs
    --bf16
"""
API = """
* ``lightrft.strategy.strategy_base.StrategyBase`` - Base strategy class
* ``lightrft.strategy.get_strategy()`` - Strategy factory function
* ``lightrft.utils.add_arguments()`` - Argument configuration
"""


def names_in(table):
    return [line.split("``")[1].removesuffix("()") for line in table.splitlines() if "``" in line]


def parse(command_line):
    return add_arguments(argparse.ArgumentParser()).parse_args(command_line)


def with_engine(**settings):
    strategy = get_fake_strategy({"train_batch_size": 2, **settings})
    strategy.inference_engine = FakeEngine(EngineConfig(engine_type="fake", model_path=""))
    return strategy


@pytest.mark.parametrize("line", [line for line in FLAGS.splitlines() if line])
def test_every_flag_is_parsed_as_printed(line):
    words = shlex.split(line, comments=True)
    args = parse(words)
    name = words[0].removeprefix("--")
    if name == "disable_engine_sleep":
        assert args.enable_engine_sleep is False
        return
    value = vars(args)[name]
    expected = words[1] if len(words) == 2 else "True"
    assert str(value) == expected
    # The same value reaches the configuration, from which strategies read it.
    assert vars(StrategyConfig.from_args(args))[name] == value


def test_engine_sleep_defaults_to_true():
    assert parse([]).enable_engine_sleep is True


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_recipes_are_parsed_as_printed(recipe):
    words = shlex.split(RECIPES[recipe].replace("\\\n", " "), comments=True)
    assert words[0] == "python"
    args = parse(words[2:])
    assert args.engine_tp_size in (2, 4)
    assert args.enable_engine_sleep


def test_gathering_groups_are_those_of_the_example():
    """With world_size=8 and engine_tp_size=4, ranks [0,1,2,3] gather to rank 0, ..."""
    assert engine_group_ranks(8, 4)[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_world_size_must_be_a_multiple_of_engine_tp_size():
    """Ensure ``world_size % engine_tp_size == 0``."""
    check_divides(8, "engine_tp_size", 4)
    with pytest.raises(
        ValueError, match=r"world_size 8 and engine_tp_size 3; legal values: \[1, 2"
    ):
        check_divides(8, "engine_tp_size", 3)


def test_length_distributions_are_written_every_n_steps(tmp_path):
    """Use ``--plot_every`` with ``--log_dir`` to track generation length distribution."""
    strategy = with_engine(plot_every=2, log_dir=str(tmp_path))
    for _ in range(3):
        strategy.gather_and_generate({"max_tokens": 2}, [[3, 4]])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "gen_len_step_0.png",
        "gen_len_step_2.png",
    ]


def test_memory_can_be_monitored_anywhere(capsys):
    """Monitor memory with ``strategy.report_memory(prefix="checkpoint_name")``."""
    report = get_fake_strategy().report_memory(prefix="checkpoint_name")
    assert report.allocated_bytes > 0
    assert "checkpoint_name" in capsys.readouterr().out


def test_moving_optimizer_states_is_a_no_op_outside_fsdp():
    strategy = get_fake_strategy()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert strategy.maybe_load_optimizer(strategy.maybe_offload_optimizer(optimizer)) is optimizer


def test_the_names_of_the_api_reference_exist():
    for name in names_in(API):
        module, _, attribute = name.rpartition(".")
        # Lazy packages resolve names on access.
        assert callable(getattr(importlib.import_module(module), attribute)), name
