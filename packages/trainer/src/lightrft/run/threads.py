"""Number of CPU threads that pays for the operations of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lightrft.config import RunControlOptions, TrainConfig
from lightrft.models.loading import common_fields, load_config
from lightrft.strategy.distributed.process_end import SHARED_THREADS_VARIABLE

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

# Multiplications and additions of one matrix product that pay for one thread. Below, most other
# operations of a step are too short to be shared. benchmarks/test_bench_threads.py measures it.
FLOPS_PER_THREAD = 5e8


def decide_threads(settings: Mapping[str, object], num_tokens: int) -> tuple[int, str]:
    """Return threads for a model on CPUs, and why.

    OMP_NUM_THREADS of the environment counts. Otherwise one thread for every `FLOPS_PER_THREAD` of
    the feed-forward product over a micro-batch, and no more than this process's share of the cores.

    Args:
        settings: Settings of the model (`config.json`): hidden_size and intermediate_size.
        num_tokens: Largest number of tokens of a micro-batch.
    """
    most = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ and SHARED_THREADS_VARIABLE not in os.environ:
        return most, "OMP_NUM_THREADS of the environment"
    if "OMP_NUM_THREADS" not in os.environ:
        most = max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    hidden = settings.get("hidden_size")
    if not isinstance(hidden, int):
        return most, "all cores, since the model's configuration names no hidden_size"
    inner = settings.get("intermediate_size")
    flops = 2.0 * num_tokens * hidden * (inner if isinstance(inner, int) else 4 * hidden)
    worth = max(1, int(flops // FLOPS_PER_THREAD))
    size = f"a product takes {flops / 1e9:.2g} GFLOP, {FLOPS_PER_THREAD / 1e9} pay a thread"
    return min(worth, most), f"{size}, and {most} may be used"


def max_micro_batch_tokens(config: TrainConfig) -> int:
    """Return the largest number of tokens in a micro-batch of the update."""
    if config.micro_batch_tokens is not None:
        return config.micro_batch_tokens
    return config.micro_train_batch_size * (config.prompt_max_len + config.generate_max_len)


def choose_threads(config: TrainConfig, context: DistributedContext) -> TrainConfig:
    """Return the configuration with the threads of this process, now set; print a choice.

    On a GPU nothing is chosen: there threads only pass work on.
    """
    if config.num_threads is None and not context.has_gpu:
        settings = common_fields(load_config(str(config.pretrain)).get_text_config())
        chosen, why = decide_threads(settings, max_micro_batch_tokens(config))
        context.print(f"num_threads = {chosen}: {why}")
        config = config.replaced({"num_threads": chosen})
    use_threads(config)
    return config


def use_threads(config: RunControlOptions) -> None:
    """Set the number of threads, if it is known."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
