"""Settings with which a run fits into its machine."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from lightrft.config import ConfigError, TrainConfig
from lightrft.tools.plan.memory import MemoryPlan, fitting_budget, fitting_share, plan_memory
from lightrft.tools.plan.setup import Setup

# At most one of each row is chosen; the cheapest come first.
CHOICES: tuple[tuple[Mapping[str, object], ...], ...] = (
    ({"gradient_checkpointing": True},),
    ({"micro_train_batch_size": 1, "micro_rollout_batch_size": 1},),
    ({"zero_stage": 3}, {"fsdp": True}),
    ({"adam_offload": True}, {"fsdp_cpu_offload": True, "adam_offload": False}),
)
# Settings of the engine, which cost less than all choices.
ENGINE = ("engine_tp_size", "engine_mem_util")


# What is named beside the settings, where it fits.
ADAPTERS = {"lora_rank": 16}


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings to change and the plan with them.

    Args:
        changes: Options and their new values; empty if the run fits as it is.
        plan: Plan with the changes; it may still not fit.
        or_adapters: Whether adapters fit in their place.
    """

    changes: Mapping[str, object]
    plan: MemoryPlan
    or_adapters: bool = False

    @property
    def flags(self) -> str:
        """The changes as flags of the command line."""
        texts = []
        for name, value in self.changes.items():
            if isinstance(value, bool):
                texts.append(f"--{name}" if value else f"--no_{name}")
            else:
                texts.append(f"--{name} {value}")
        return " ".join(texts)

    def __str__(self) -> str:
        if self.plan.fits:
            return f"feasible settings: {self.flags}{' (or --lora_rank 16)' * self.or_adapters}"
        return (
            f"nor does what the other options give fit ({self.flags}; "
            f"{'; '.join(self.plan.problems)}): more or larger GPUs, a shorter "
            "generate_max_len, or --lora_rank"
        )


def advise(setup: Setup) -> Advice:
    """Return the cheapest changes with which all fits, or those that come nearest to it."""
    now = Advice({}, plan_memory(setup))
    if now.plan.fits:
        return now
    candidates = list(_candidates(setup))
    fitting = [advice for advice in candidates if advice.plan.fits]
    if not fitting:
        return min((now, *candidates), key=lambda each: _excess(each.plan))
    # Each setting costs more than all before it together.
    order = [*ENGINE, *(name for choice in _choices(setup) for step in choice for name in step)]
    best = min(fitting, key=lambda each: sum(2 ** order.index(name) for name in each.changes))
    adapted = None if setup.config.lora_rank else _changed(setup, ADAPTERS)
    return replace(best, or_adapters=adapted is not None and plan_memory(adapted).fits)


def _excess(plan: MemoryPlan) -> float:
    """Return the largest ratio of need to supply."""
    needs = [plan.worst.device_bytes / max(1.0, plan.usable_bytes)]
    if plan.setup.host_bytes:
        needs.append(plan.host_bytes / plan.setup.host_bytes)
    if plan.room is not None:
        needs.append(plan.room.least_bytes / max(1.0, plan.room.share_bytes))
    return max(needs)


def _choices(setup: Setup) -> list[list[dict[str, object]]]:
    """Return what may be changed; without rollouts, none of their options."""
    left_out = () if setup.rolls_out else ("micro_rollout_batch_size",)
    choices = [
        [{n: value for n, value in step.items() if n not in left_out} for step in choice]
        for choice in CHOICES
    ]
    if setup.config.micro_batch_tokens is not None:
        choices.append([{"micro_batch_tokens": fitting_budget(setup)}])
    return choices


def _combinations(setup: Setup) -> Iterator[dict[str, object]]:
    config = setup.config
    for steps in product(*([{}, *choice] for choice in _choices(setup))):
        merged = {name: value for step in steps for name, value in step.items()}
        uses_fsdp = bool(merged.get("fsdp", config.fsdp))
        # Each option belongs to one way of sharding.
        if (uses_fsdp and "zero_stage" in merged) or (
            not uses_fsdp and "fsdp_cpu_offload" in merged
        ):
            continue
        yield _acting(merged, config)


def _acting(step: Mapping[str, object], config: TrainConfig) -> dict[str, object]:
    """Return the settings of a step that change something."""
    if "fsdp_cpu_offload" in step and not step.get("fsdp", config.fsdp):
        return {}
    return {k: v for k, v in step.items() if config.__dict__[k] != v}


def _candidates(setup: Setup) -> Iterator[Advice]:
    """Yield each combination with the engine as is, over more GPUs, and with a share that fits."""
    configured, sizes = setup.config.engine_tp_size, [setup.config.engine_tp_size]
    if setup.has_server_engine and setup.has_gpu:
        sizes += [
            tp
            for tp in (2, 4, 8)
            if configured < tp <= setup.ranks_per_node
            # vLLM cuts the model and the world into these parts.
            and setup.actor_size.num_heads % tp == 0
            and setup.world_size % tp == 0
        ]
    for changes, tp in product(_combinations(setup), sizes):
        wanted = changes if tp == configured else {**changes, "engine_tp_size": tp}
        changed = _changed(setup, wanted)
        if changed is None:
            continue
        plan = plan_memory(changed)
        yield Advice(wanted, plan)
        share = fitting_share(plan)
        if share is not None and not math.isclose(share, setup.config.engine_mem_util):
            more = {"engine_mem_util": share}
            config = changed.config.replaced(more)
            yield Advice({**wanted, **more}, plan_memory(replace(changed, config=config)))


def _changed(setup: Setup, changes: Mapping[str, object]) -> Setup | None:
    """Return a setup with changes; None if its other options exclude them."""
    try:
        return replace(setup, config=setup.config.replaced(changes))
    except ConfigError:
        return None
