"""`lightrft plan`: the memory of a run on GPUs that need not be there."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightrft.cli.errors import ExitCode, refuse
from lightrft.cli.options import Parser, add_options, available_options, parse_options
from lightrft.config import ConfigError
from lightrft.run.gpus import GPUS, Gpu, find_gpu
from lightrft.tools.commands import parser_of
from lightrft.tools.plan.advice import Advice, advise
from lightrft.tools.plan.memory import (
    UNTRACED_TOLERANCE,
    MemoryPlan,
    gigabytes,
    memory_table,
    plan_memory,
    summary,
    with_budget,
)
from lightrft.tools.plan.setup import PLANNED, Setup
from lightrft.tools.plan.sizes import GB, SHAPES, read_model_size

UNTRACED = (
    "not traced on a device: updates of ZeRO in bfloat16 were compared with this sum on CPUs alone "
    f"and may need up to {UNTRACED_TOLERANCE - 1:.0%} more; those of --fsdp were traced"
)
# What "auto" takes where there is a GPU.
ON_A_GPU = {"auto": "vllm"}


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft plan --help`."""
    setup, gpu, as_json = setup_of(argv)
    plan, advice = plan_memory(with_budget(setup)), advise(setup)
    if as_json:
        print(json.dumps(to_json(plan, advice), indent=2))
    else:
        print(full_report(plan, advice, gpu))
    return ExitCode.OK if plan.fits else ExitCode.OUT_OF_MEMORY


def setup_of(argv: Sequence[str]) -> tuple[Setup, Gpu, bool]:
    """Return what the arguments plan for, its device, and whether a program reads the answer.

    Raises:
        ConfigError: Options that cannot be planned for.
    """
    config, parsed, problems = parse_options(build_parser(), argv)
    if config.pretrain is None:
        problems = [
            *problems,
            f"--pretrain is missing: give a model directory or one of {', '.join(SHAPES)}",
        ]
    stages = {parsed.stage} if parsed.stage else set()
    if parsed.config:
        from lightrft.run.resume import stage_of  # it needs NumPy

        stages |= {stage_of(Path(path).parent) for path in parsed.config} - {""}
    problems += [
        f"--config is of a run of the stage {name}: expected one of {', '.join(PLANNED)}"
        for name in sorted(stages - PLANNED.keys())
    ]
    if len(stages) > 1:
        problems.append(f"one plan is of one stage: got {' and '.join(sorted(stages))}")
    stage = min(stages, default="policy")
    if stage == "divergence" and not config.teacher_places:
        problems.append("--teacher is missing: its weights are held, too")
    refuse(problems, ConfigError)
    config = config.overlapped(parsed.gpus) if stage == "policy" else config
    gpu = find_gpu(parsed.gpu)
    setup = Setup(
        config=config,
        actor_size=read_model_size(str(config.pretrain)),
        world_size=parsed.gpus,
        most_per_node=parsed.gpus_per_node,
        has_gpu=True,
        capacity_bytes=gpu.memory_bytes,
        engine=ON_A_GPU.get(config.engine_type, config.engine_type),
        node_bytes=parsed.host_memory * GB or None,
        stage=stage,
        rows_per_item=PLANNED[stage],
        mean_length_share=parsed.mean_length_share,
    )
    return setup, gpu, parsed.json


def build_parser() -> Parser:
    """Return the parser of `lightrft plan`."""
    shapes, gpus = ", ".join(SHAPES), ", ".join(GPUS)
    parser = parser_of("plan", {"--stage": PLANNED}, takes_options=True, shapes=shapes, gpus=gpus)
    add_options(parser, available_options("plan"))
    return parser


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def to_json(plan: MemoryPlan, advice: Advice) -> dict[str, object]:
    """Return the answer for a program.

    Args:
        plan: Memory of the settings of the command.
        advice: Settings that fit, or come nearest to it.
    """
    return {
        "fits": plan.fits,
        "is_traced": plan.is_traced,
        "problems": plan.problems,
        "usable_bytes": plan.usable_bytes,
        "phases": {phase.name: phase.device_bytes for phase in plan.phases},
        "host_bytes": plan.host_bytes,
        "micro_batch_tokens": plan.setup.config.micro_batch_tokens,
        "feasible_settings": dict(advice.changes) if advice.plan.fits else None,
    }


def full_report(plan: MemoryPlan, advice: Advice, gpu: Gpu) -> str:
    """Return the whole text of `lightrft plan`.

    Args:
        plan: Memory of the settings of the command.
        advice: Settings that fit, or come nearest to it.
        gpu: Device of each rank.
    """
    setup, flags = plan.setup, ""
    budget = setup.config.micro_batch_tokens
    lines = [
        f"{setup.actor_size.parameters / GB:.2f}e9 parameters, {setup.world_size} ranks, "
        + (f"engine {setup.engine}" if setup.rolls_out else f"stage {setup.stage}"),
        "",
        "Memory of a rank at the peak of each phase:",
        memory_table(plan),
        "",
        summary(plan),
        *([f"micro_batch_tokens: {budget}, unless one is given"] if budget else []),
        *([] if plan.is_traced else [UNTRACED]),
    ]
    lines += [f"does not fit: {problem}" for problem in plan.problems]
    if plan.fits:
        lines.append("fits: these settings are feasible")
        setup = advice.plan.setup
    else:
        lines.append(str(advice))
        if advice.plan.fits:
            setup, flags = advice.plan.setup, advice.flags
            lines.append(summary(plan_memory(with_budget(setup))))
    if setup.rolls_out:
        lines += [
            "",
            f"With {flags or 'these settings'}:",
            *count_table(setup),
            "",
            f"GPU: NVIDIA {gpu.source}.",
        ]
    return "\n".join(lines)


def count_table(setup: Setup) -> Iterator[str]:
    """Yield the lines of a Markdown table with the memory of a rank by number of GPUs."""
    yield "| GPUs | memory of a rank | micro_batch_tokens |"
    yield "|---:|---:|---:|"
    for number in COUNTS:
        if number % setup.config.engine_tp_size == 0:
            plan = plan_memory(with_budget(replace(setup, world_size=number)))
            budget = plan.setup.config.micro_batch_tokens or ""
            cells = f"{gigabytes(plan.worst.device_bytes)} | {budget}"
            yield f"| {number} | {cells if plan.fits else 'too large | '} |"
