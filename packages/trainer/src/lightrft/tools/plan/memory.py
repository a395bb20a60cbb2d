"""The memory of a run, phase by phase, against what its machine has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightrft.run.gpus import GB
from lightrft.tools.plan.backends import (
    Term,
    evaluated,
    forward_peak,
    gathered,
    resting,
    train_peak,
)
from lightrft.tools.plan.setup import Setup

MEGABYTE = 1_000_000
# Buckets in flight at a time.
NUM_BUCKETS = 2
# The CUDA context with the libraries' kernels, and NCCL's channels: of a rank, about.
CONTEXT_BYTES = 1.5 * GB
RESERVE = 0.05


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one phase of a run on a rank at its peak.

    Args:
        name: Of the phase.
        terms: What adds up.
    """

    name: str
    terms: tuple[Term, ...]

    @property
    def device_bytes(self) -> float:
        """On the device (on the host without a GPU)."""
        return sum(term.num_bytes for term in self.terms if not term.is_on_host)

    @property
    def host_bytes(self) -> float:
        """On the host beside a GPU."""
        return sum(term.num_bytes for term in self.terms if term.is_on_host)


@dataclass(frozen=True)
class MemoryPlan:
    """All phases of a run.

    Args:
        setup: What it was made for.
        phases: In the order of a step.
    """

    setup: Setup
    phases: tuple[Phase, ...]

    @property
    def usable_bytes(self) -> float:
        """Of a rank's memory, without the reserve."""
        return self.setup.capacity_bytes * (1 - RESERVE)

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def host_bytes(self) -> float:
        """Of one rank, at most."""
        return max(phase.host_bytes for phase in self.phases)

    @property
    def fits(self) -> bool:
        """Whether every phase fits into the device and, where it is known, the host."""
        host = self.setup.host_bytes
        fits_host = host is None or self.host_bytes <= host
        return self.worst.device_bytes <= self.usable_bytes and fits_host


def plan_memory(setup: Setup) -> MemoryPlan:
    """Predicts every phase, from the second step on, when all states exist."""
    always = [*_context(setup), *_models(setup)]
    asleep = [] if _sleeps(setup) else list(_engine(setup))
    phases = (
        Phase("load", (*_context(setup), *_loading(setup))),
        Phase("rollout", (*always, *_engine(setup))),
        Phase("score", (*always, *asleep, *_scoring(setup))),
        Phase("train", (*always, *asleep, *_training(setup))),
        Phase("sync", (*always, *_engine_weights(setup), *_buckets(setup))),
        Phase("save", (*always, *asleep, *_saving(setup))),
    )
    return MemoryPlan(setup, phases)


def rank_bytes(terms: Sequence[Term]) -> float:
    """The sum of what lies on the device."""
    return sum(term.num_bytes for term in terms if not term.is_on_host)


def largest_engine_share(plan: MemoryPlan) -> float:
    """The largest `engine_mem_util` with which the rollout fits; may be 0 or less."""
    setup = plan.setup
    always = rank_bytes([*_context(setup), *_models(setup)])
    others = max(p.device_bytes for p in plan.phases if p.name != "rollout")
    if not _sleeps(setup):
        always = max(always, others - rank_bytes(list(_engine(setup))))
    return (plan.usable_bytes - always) / setup.capacity_bytes


def least_engine_bytes(setup: Setup) -> float:
    """Weights, and the keys and values of one response of full length."""
    size, c, tp = setup.actor_size, setup.compute_bytes, setup.config.engine_tp_size
    row = 2 * c * size.num_layers * size.kv_width * setup.row_tokens
    return (c * size.parameters + row) / tp


def _context(setup: Setup) -> Iterator[Term]:
    if setup.has_gpu:
        yield Term("CUDA context and NCCL", CONTEXT_BYTES)


def _models(setup: Setup) -> Iterator[Term]:
    yield from resting(setup, setup.actor)
    if setup.critic is not None:
        for term in resting(setup, setup.critic):
            yield Term(f"critic: {term.name}", term.num_bytes, term.is_on_host)
    for name, model in setup.evaluated.items():
        yield Term(name, evaluated(setup, model))


def _sleeps(setup: Setup) -> bool:
    return setup.config.enable_engine_sleep and setup.engine in ("vllm", "sglang")


def _shares_memory(setup: Setup) -> bool:
    """The embedded engine uses the trainer's weights where they are whole and of its dtype."""
    config = setup.config
    is_whole = setup.world_size == 1 or (not config.fsdp and config.zero_stage < 3)
    is_alike = not config.fsdp or setup.compute_bytes == 4
    return setup.engine == "fake" or (is_whole and is_alike and config.lora_rank == 0)


def _engine_weights(setup: Setup) -> Iterator[Term]:
    if setup.engine in ("vllm", "sglang"):
        total = setup.compute_bytes * setup.actor_size.parameters
        yield Term("engine: weights", total / setup.config.engine_tp_size)
    elif not _shares_memory(setup):
        yield Term("engine: weights", setup.compute_bytes * setup.actor_size.parameters)


def _engine(setup: Setup) -> Iterator[Term]:
    if setup.engine in ("vllm", "sglang") and setup.has_gpu:
        share = setup.config.engine_mem_util * setup.capacity_bytes
        yield Term("engine: weights, cache, graphs", share)
        return
    yield from _engine_weights(setup)
    size = setup.actor_size
    row = 2 * setup.compute_bytes * size.num_layers * size.kv_width * setup.row_tokens
    yield Term("engine: keys and values", setup.samples_per_rank * row)


def _buckets(setup: Setup) -> Iterator[Term]:
    size = NUM_BUCKETS * setup.config.weight_bucket_mb * MEGABYTE
    total = setup.compute_bytes * setup.actor_size.parameters
    if not _shares_memory(setup):
        yield Term("buckets of weights", min(size, NUM_BUCKETS * total))


def _loading(setup: Setup) -> Iterator[Term]:
    """Sharding takes whole weights from the host, unless ranks read their own rows."""
    yield from (term for term in _models(setup) if "Adam" not in term.name)
    if not setup.builds_on_meta:
        whole = 4 * setup.actor_size.parameters
        yield Term("whole float32 weights, on the way", whole, is_on_host=setup.has_gpu)


def _scoring(setup: Setup) -> list[Term]:
    rows = setup.config.micro_rollout_batch_size
    models = [setup.actor, *setup.evaluated.values()]
    models += [] if setup.critic is None else [setup.critic]
    return max((list(forward_peak(setup, model, rows)) for model in models), key=rank_bytes)


def _training(setup: Setup) -> list[Term]:
    """Actor and critic take turns, and gradients are gone after each."""
    models = [setup.actor] if setup.critic is None else [setup.actor, setup.critic]
    return max((train_peak(setup, model) for model in models), key=rank_bytes)


def _saving(setup: Setup) -> Iterator[Term]:
    largest = max(setup.actor_size.embedding_parameters, setup.actor_size.layer_parameters)
    if gathered(setup, setup.actor):
        yield Term("one whole tensor", 4 * largest)


def gigabytes(num_bytes: float) -> str:
    """With one decimal, or three below 1 GB."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / GB:.3f} GB"


def memory_table(plan: MemoryPlan) -> str:
    """One block of lines for each phase, its terms from the largest on."""
    lines = []
    for phase in plan.phases:
        verdict = "" if phase.device_bytes <= plan.usable_bytes else "  TOO LARGE"
        lines.append(f"{phase.name:8} {gigabytes(phase.device_bytes):>10}{verdict}")
        lines += _terms(phase)
    return "\n".join(lines)


def summary(plan: MemoryPlan) -> str:
    """The verdict in one line."""
    worst, setup = plan.worst, plan.setup
    where = "GPU" if setup.has_gpu else "share of the host"
    text = (
        f"largest phase {worst.name}: {gigabytes(worst.device_bytes)} of "
        f"{gigabytes(plan.usable_bytes)} ({gigabytes(setup.capacity_bytes)} of each rank's {where} "
        f"less {RESERVE:.0%})"
    )
    if plan.host_bytes:
        text += f", and {gigabytes(plan.host_bytes)} of the host"
    return text


def _terms(phase: Phase) -> list[str]:
    found = sorted(phase.terms, key=lambda term: -term.num_bytes)
    return [
        f"  {gigabytes(term.num_bytes):>12}  {term.name}{' (host)' if term.is_on_host else ''}"
        for term in found
        if term.num_bytes >= 1e-3 * max(1.0, phase.device_bytes + phase.host_bytes)
    ]
