"""Settings with which a run fits into its machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightrft.config import TrainConfig
from lightrft.tools.plan.memory import (
    MemoryPlan,
    largest_engine_share,
    least_engine_bytes,
    plan_memory,
)
from lightrft.tools.plan.setup import Setup

# From the cheapest on; each is added to those before it.
STEPS: tuple[Mapping[str, object], ...] = (
    {"gradient_checkpointing": True},
    {"micro_train_batch_size": 1, "micro_rollout_batch_size": 1},
    {"fsdp": True},
    {"adam_offload": True},
    {"fsdp_cpu_offload": True, "adam_offload": False},
)
LEAST_SHARE = 0.1
NUM_REMEDIES = 3


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings to change and the plan with them.

    Args:
        changes: Options and their new values; empty if the run fits as it is.
        plan: With them; it may still not fit.
    """

    changes: Mapping[str, object]
    plan: MemoryPlan

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


def advise(setup: Setup) -> Advice:
    """The fewest changes, cheapest first, with which every phase fits."""
    changes: dict[str, object] = {}
    found = Advice(changes, plan_memory(setup))
    for step in ({}, *STEPS):
        changes.update(_acting(step, setup.config, changes))
        for engine in _engine_changes(setup, changes):
            wanted = {**changes, **engine}
            plan = plan_memory(_changed(setup, wanted))
            found = Advice(_differing(wanted, setup.config), plan)
            if plan.fits:
                return found
    return found


def remedies(setup: Setup) -> list[str]:
    """Single changes that lower the worst phase most, with what they save."""
    worst = plan_memory(setup).worst
    savings = []
    for step in STEPS:
        changes = _acting(step, setup.config, {})
        if not changes:
            continue
        plan = plan_memory(_changed(setup, changes))
        now = next(p for p in plan.phases if p.name == worst.name).device_bytes
        if worst.device_bytes - now > 0.01 * worst.device_bytes:
            advice = Advice(changes, plan)
            savings.append(f"{advice.flags}: {(worst.device_bytes - now) / 1e9:.1f} GB less")
    return savings[:NUM_REMEDIES]


def _acting(
    step: Mapping[str, object], config: TrainConfig, before: Mapping[str, object]
) -> dict[str, object]:
    """The settings of a step that change something."""
    uses_fsdp = bool(before.get("fsdp", config.fsdp))
    if "fsdp_cpu_offload" in step and not uses_fsdp:
        return {}
    return {k: v for k, v in step.items() if before.get(k, config.__dict__[k]) != v}


def _engine_changes(setup: Setup, changes: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The engine as it is, then with a share that fits, then over more GPUs."""
    yield {}
    if not setup.has_server_engine or not setup.has_gpu:
        return
    tp = setup.config.engine_tp_size
    while tp <= min(setup.ranks_per_node, setup.world_size):
        trial = _changed(setup, {**changes, "engine_tp_size": tp})
        share = int(20 * largest_engine_share(plan_memory(trial))) / 20
        share = min(share, 0.9)
        needed = least_engine_bytes(trial) / setup.capacity_bytes
        if share >= max(LEAST_SHARE, needed):
            yield {"engine_tp_size": tp, "engine_mem_util": min(share, _wanted(setup, share))}
        tp *= 2


def _wanted(setup: Setup, share: float) -> float:
    """The user's share where that fits."""
    return min(share, max(setup.config.engine_mem_util, LEAST_SHARE))


def _changed(setup: Setup, changes: Mapping[str, object]) -> Setup:
    return replace(setup, config=setup.config.replaced(changes))


def _differing(changes: Mapping[str, object], config: TrainConfig) -> dict[str, object]:
    return {k: v for k, v in changes.items() if config.__dict__[k] != v}
