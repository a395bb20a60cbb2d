"""The memory budget of a run on the machine that it starts on."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines.factory import resolve_engine_type
from lightrft.stages.stage import StageInputs
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.plan.memory import (
    TOLERANCE,
    MemoryPlan,
    fitting_share,
    gigabytes,
    memory_table,
    plan_memory,
    summary,
    with_budget,
    with_tokens,
)
from lightrft.tools.plan.setup import PLANNED, Setup
from lightrft.tools.plan.sizes import read_model_size


def check_budget(
    config: TrainConfig,
    strategy: StrategyBase,
    *,
    stage: str = "policy",
    inputs: StageInputs | None = None,
    resumes: bool = False,
) -> TrainConfig:
    """Compare what a run will need with what its ranks have; collective.

    On GPUs, an engine's share that leaves too little is lowered, and micro-batches get the token
    budget that fits, on all ranks alike.

    Args:
        config, strategy: Options of the run, and its ranks, which get the planned bytes.
        stage: Name in `config.registry.STAGES`; the memory of others is not known.
        inputs: Rows of the stage; None are those of rollouts.
        resumes: Whether the run continues: its micro-batches then stay as they are.

    Returns:
        The configuration, with the share and the token budget that fit.

    Raises:
        MemoryError: The run cannot fit on a GPU; the message shows the sum and cheapest remedies.
    """
    path = Path(str(config.pretrain))
    if not config.check_memory or not (path / "config.json").is_file():
        return config  # a name of the hub: its shape is known once it is loaded
    if stage not in PLANNED:
        return config
    items = () if inputs is None else inputs.items()
    try:
        setup = machine_setup(config, strategy.context, stage)
        if items:
            setup = replace(
                setup,
                rows_per_item=max(map(len, items)),
                longest_row=max(len(row.token_ids) for item in items for row in item),
            )

        def least(tokens: int) -> int:
            return -int(strategy.all_reduce(-tokens, op="max"))

        config = settle(setup, strategy.print, agree=None if resumes else least)
        phases = plan_memory(replace(setup, config=config)).phases
        strategy.context.planned_bytes = {phase.name: phase.allocated_bytes for phase in phases}
        return config
    except ConfigError as error:  # a plan that cannot be made refuses no run
        strategy.print(f"memory is not planned: {error}")
        return config


def settle(
    setup: Setup, write: Callable[[str], None], *, agree: Callable[[int], int] | None = int
) -> TrainConfig:
    """Decide for `check_budget`, once the machine is known; the same on all ranks.

    Args:
        setup: Run on the machine.
        write: Callback that gets a line for each decision.
        agree: Callback that returns the minimum of a number over all ranks; None leaves
            micro-batches as they are.
    """
    plan = plan_memory(setup)
    # Ranks that generate in other processes keep the configured share.
    may_change = setup.has_server_engine and not setup.config.rollout_ranks
    if setup.has_gpu and not plan.fits and may_change:
        plan = _with_another_share(plan, write)
    tokens = with_budget(plan.setup).config.micro_batch_tokens
    if agree is not None and tokens is not None and setup.config.micro_batch_tokens is None:
        plan = plan_memory(with_tokens(plan.setup, agree(tokens)))
        train = next(phase for phase in plan.phases if phase.name == "train")
        write(
            f"micro_batch_tokens = {plan.setup.config.micro_batch_tokens}: the peak of train is "
            f"planned at {gigabytes(train.device_bytes)} of {gigabytes(plan.usable_bytes)}"
        )
    config = plan.setup.config
    write(f"memory: {summary(plan)}")
    if plan.fits:
        return config
    from lightrft.tools.plan.advice import advise

    advice = "\n  ".join(("; ".join(plan.problems), str(advise(plan.setup))))
    if setup.has_gpu and is_hopeless(plan):
        raise MemoryError(
            f"the run needs more memory than its GPUs have: {summary(plan)}\n"
            f"{memory_table(MemoryPlan(plan.setup, (plan.worst,)))}\n{advice}\n"
            "--no_check_memory starts it all the same"
        )
    write(f"warning: this may run out of memory: {advice}")
    return config


def is_hopeless(plan: MemoryPlan) -> bool:
    """Return whether the device or the engine's share lacks more than a prediction errs by.

    The host only gets a warning: it has swap, and other programs may end.
    """
    room = plan.room
    lacks_share = room is not None and room.least_bytes > TOLERANCE * room.share_bytes
    return lacks_share or plan.worst.device_bytes > plan.tolerance * plan.usable_bytes


def machine_setup(config: TrainConfig, context: DistributedContext, stage: str = "policy") -> Setup:
    """Return the run on this machine; its smallest rank counts, so that all ranks decide alike."""
    local_bytes = device_bytes(context.device)
    has_gpu = context.all_reduce(int(local_bytes is None), op="max") == 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or context.world_size)
    host = psutil.virtual_memory().available / ranks
    capacity = local_bytes if has_gpu and local_bytes is not None else host
    capacity, host = (-float(context.all_reduce(-x, op="max")) for x in (capacity, host))
    engine = config.engine_type
    if stage != "policy" or (config.rollout_ranks and not config.devices_shared):
        engine = ""
    return Setup(
        config=config,
        actor_size=read_model_size(str(config.pretrain)),
        world_size=context.world_size,
        most_per_node=ranks,
        has_gpu=has_gpu,
        capacity_bytes=capacity,
        engine=resolve_engine_type(engine) if engine == "auto" else engine,
        node_bytes=ranks * host if has_gpu else None,
        stage=stage,
    )


def device_bytes(device: torch.device) -> float | None:
    """Return the memory of a rank's GPU; None without one."""
    is_gpu = device.type == "cuda"
    return float(torch.cuda.get_device_properties(device).total_memory) if is_gpu else None


def _with_another_share(plan: MemoryPlan, write: Callable[[str], None]) -> MemoryPlan:
    """Return the plan with an engine's share that works beside the trainer, if there is one."""
    setup, share = plan.setup, fitting_share(plan)
    configured = setup.config.engine_mem_util
    if share is None or share == configured:
        return plan
    why = "the trainer needs the rest" if share < configured else "its weights and rows need it"
    write(f"engine_mem_util = {share:g} instead of {configured:g}: {why}")
    return plan_memory(replace(setup, config=setup.config.replaced({"engine_mem_util": share})))
