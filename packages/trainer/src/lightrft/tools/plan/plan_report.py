"""A plan as text."""

from collections.abc import Sequence

from lightrft.run.gpus import GB, Gpu
from lightrft.tools.plan.advice import advise, remedies
from lightrft.tools.plan.duration import (
    CONSTANTS,
    StepSeconds,
    efficiency,
    scale,
    where_it_stops_paying,
)
from lightrft.tools.plan.memory import gigabytes, memory_table, plan_memory, summary
from lightrft.tools.plan.setup import Setup

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def full_report(setup: Setup, gpu: Gpu | None) -> tuple[str, bool]:
    """The whole text of `lightrft plan`, and whether some settings fit."""
    plan = plan_memory(setup)
    lines = [
        f"{setup.actor_size.parameters / GB:.2f}e9 parameters, {setup.world_size} ranks, "
        f"engine {setup.engine}",
        "",
        "Memory of a rank at the peak of each phase:",
        memory_table(plan),
        "",
        summary(plan),
    ]
    advice = advise(setup)
    if plan.fits:
        lines.append("fits: these settings are feasible")
    elif advice.plan.fits:
        lines += [f"does not fit; feasible settings: {advice.flags}", summary(advice.plan)]
        setup = advice.plan.setup
    else:
        lines.append(
            "does not fit, nor does what the other options give "
            f"({advice.flags}): more or larger GPUs, a shorter generate_max_len, or --lora_rank"
        )
    single = remedies(plan.setup) if not plan.fits else []
    lines += [f"  {number}. {text}" for number, text in enumerate(single, start=1)]
    if gpu is not None:
        rows = scale(setup, gpu, COUNTS)
        lines += ["", "Predicted seconds of a step:", time_table(rows)]
        lines.append(where_it_stops_paying(setup, rows))
        lines.append(
            f"Constants: {sum(c.is_measured for c in CONSTANTS.values())} of {len(CONSTANTS)} are "
            "measured; the others are assumptions (docs/scaling.md)."
        )
        lines.append(f"GPU: NVIDIA {gpu.source}.")
    return "\n".join(lines), advice.plan.fits


def time_table(rows: Sequence[StepSeconds]) -> str:
    """A line for each number of GPUs; also a table of Markdown."""
    names = ("rollout", "exchange", "score", "train", "sync", "total")
    lines = ["| GPUs | memory | " + " | ".join(names) + " | efficiency |"]
    lines.append("|" + "---:|" * (len(names) + 3))
    for row, share in zip(rows, efficiency(rows), strict=True):
        values = (row.rollout, row.exchange, row.score, row.train, row.sync, row.total)
        numbers = " | ".join(f"{value:.2f}" for value in values)
        memory = "too large" if row.memory_bytes is None else gigabytes(row.memory_bytes)
        lines.append(f"| {row.num_gpus} | {memory} | {numbers} | {share:.0%} |")
    return "\n".join(lines)
