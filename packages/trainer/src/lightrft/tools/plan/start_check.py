"""The budget of a run on the machine that it starts on."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from lightrft.config import TrainConfig
from lightrft.engines.factory import resolve_engine_type
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.plan.memory import (
    MemoryPlan,
    largest_engine_share,
    least_engine_bytes,
    memory_table,
    plan_memory,
    summary,
)
from lightrft.tools.plan.setup import Setup, read_model_size

# A prediction that is over by less than this is no reason to stop a run.
TOLERANCE = 1.1


def check_budget(config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
    """Compares what a run will need with what its ranks have; collective.

    On GPUs the share of an engine that would leave too little is lowered, on all ranks alike.

    Returns:
        The configuration, with the share that fits.

    Raises:
        MemoryError: It cannot fit on a GPU; the message shows the sum and the cheapest remedies.
    """
    path = Path(str(config.pretrain))
    if not config.check_memory or not (path / "config.json").is_file():
        return config  # a name of the hub: its shape is known once it is loaded
    return settle(machine_setup(config, strategy), strategy.print)


def settle(setup: Setup, write: Callable[[str], None]) -> TrainConfig:
    """The decision of `check_budget`, once the machine is known; the same on all ranks."""
    config, plan = setup.config, plan_memory(setup)
    if setup.has_gpu and not plan.fits and setup.has_server_engine:
        config, plan = _with_smaller_engine(plan, write)
    over = plan.worst.device_bytes / max(1.0, plan.usable_bytes)
    write(f"memory: {summary(plan)}")
    if over <= 1:
        return config
    from lightrft.tools.plan.advice import advise, remedies

    lines = [f"  {number}. {text}" for number, text in enumerate(remedies(plan.setup), start=1)]
    found = advise(plan.setup)
    if found.plan.fits:
        lines.append(f"  settings that fit: {found.flags}")
    advice = "\n".join(lines)
    if setup.has_gpu and over > TOLERANCE:
        raise MemoryError(
            f"the run needs more memory than its GPUs have: {summary(plan)}\n"
            f"{memory_table(MemoryPlan(plan.setup, (plan.worst,)))}\n{advice}\n"
            "--no_check_memory starts it all the same"
        )
    write(f"warning: this may run out of memory\n{advice}")
    return config


def machine_setup(config: TrainConfig, strategy: StrategyBase) -> Setup:
    """The run on this machine; its smallest rank counts, so that all ranks decide alike."""
    has_gpu = strategy.all_reduce(int(strategy.device.type != "cuda"), op="max") == 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or strategy.world_size)
    host = psutil.virtual_memory().available / ranks
    capacity = host
    if has_gpu:
        capacity = float(torch.cuda.get_device_properties(strategy.device).total_memory)
    capacity, host = (-float(strategy.all_reduce(-x, op="max")) for x in (capacity, host))
    engine = config.engine_type
    return Setup(
        config=config,
        actor_size=read_model_size(str(config.pretrain)),
        world_size=strategy.world_size,
        ranks_per_node=ranks,
        has_gpu=has_gpu,
        capacity_bytes=capacity,
        engine=resolve_engine_type(engine) if engine == "auto" else engine,
        host_bytes=host if has_gpu else None,
    )


def _with_smaller_engine(
    plan: MemoryPlan, write: Callable[[str], None]
) -> tuple[TrainConfig, MemoryPlan]:
    """The plan with the largest share of the engine that fits, if an engine can live on it."""
    setup = plan.setup
    share = int(100 * largest_engine_share(plan)) / 100
    least = least_engine_bytes(setup) / setup.capacity_bytes
    if not least < share < setup.config.engine_mem_util:
        return setup.config, plan
    config = setup.config.replaced({"engine_mem_util": share})
    write(
        f"engine_mem_util = {share:g} instead of {setup.config.engine_mem_util:g}: the trainer "
        "needs the rest"
    )
    return config, plan_memory(replace(setup, config=config))
