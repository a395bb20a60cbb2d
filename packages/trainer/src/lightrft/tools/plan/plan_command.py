"""`lightrft plan`: memory and seconds of a run on GPUs that need not be there."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, refuse
from lightrft.cli.options import Parser, add_number, add_options, available_options, parse_options
from lightrft.config import ConfigError
from lightrft.run.gpus import GB, GPUS, Gpu, find_gpu
from lightrft.tools.plan.advice import Advice, advise, remedies
from lightrft.tools.plan.constants import measured_count
from lightrft.tools.plan.duration import (
    StepSeconds,
    efficiency,
    forms,
    scale,
    where_it_stops_paying,
)
from lightrft.tools.plan.memory import (
    UNTRACED_TOLERANCE,
    MemoryPlan,
    gigabytes,
    memory_table,
    plan_memory,
    summary,
    with_budget,
)
from lightrft.tools.plan.setup import PLANNED, SHAPES, Setup, read_model_size

GPUS_PER_NODE = 8
MEAN_LENGTH_SHARE = 0.5
UNTRACED = (
    "not traced on a device: updates of ZeRO in bfloat16 were compared with this sum on CPUs alone "
    f"and may need up to {UNTRACED_TOLERANCE - 1:.0%} more; those of --fsdp were traced"
)
# What "auto" takes where there is a GPU.
ON_A_GPU = {"auto": "vllm"}


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft plan --help`.

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
        ranks_per_node=min(parsed.gpus, parsed.gpus_per_node),
        has_gpu=True,
        capacity_bytes=gpu.memory_bytes,
        engine=ON_A_GPU.get(config.engine_type, config.engine_type),
        host_bytes=parsed.host_memory * GB / min(parsed.gpus, parsed.gpus_per_node)
        if parsed.host_memory
        else None,
        stage=stage,
        rows_per_item=PLANNED[stage],
        mean_length_share=parsed.mean_length_share,
    )
    plan, advice = plan_memory(with_budget(setup)), advise(setup, gpu)
    if parsed.json:
        print(json.dumps(to_json(plan, advice), indent=2))
    else:
        print(full_report(plan, advice, gpu))
    return ExitCode.OK if plan.fits else ExitCode.OUT_OF_MEMORY


def build_parser() -> Parser:
    """Return the parser of `lightrft plan`."""
    parser = Parser(
        "plan",
        "Predict memory and seconds of a run from its options, a model's configuration and the "
        "data sheets of GPUs. Exit code 6 if these settings do not fit, as at the start of the "
        "run, also if others would. Takes the options of lightrft train and of the stages on "
        "rows; --pretrain is a model directory or one of: " + ", ".join(SHAPES) + ".",
        argument_default=argparse.SUPPRESS,
    )
    add_number(parser, "--gpus", "GPUs, one rank each.", default=1)
    add_number(parser, "--gpus_per_node", "GPUs of a node.", default=GPUS_PER_NODE)
    add_number(
        parser,
        "--host_memory",
        "GB of a node's host memory, with which loading and offloads are compared; 0 compares "
        "nothing.",
        default=0,
        lowest=0,
    )
    parser.add_argument(
        "--mean_length_share",
        type=_share,
        default=MEAN_LENGTH_SHARE,
        metavar="X",
        help="Mean response over the longest that is allowed, as the model's logs say it. Default: "
        f"{MEAN_LENGTH_SHARE} [assumed].",
    )
    parser.add_argument(
        "--json", action="store_true", default=False, help="Print JSON, without seconds."
    )
    parser.add_argument(
        "--gpu", default="h100-80g", metavar="NAME", help="One of: " + ", ".join(GPUS) + "."
    )
    parser.add_argument(
        "--stage",
        choices=tuple(PLANNED),
        default="",
        help="What is trained: policy is lightrft train, divergence lightrft distill on rows of "
        "--prompt_data. Others than policy count memory alone, of rows of --max_row_tokens tokens, "
        "two of a pair. Unset is that of --config, else policy.",
    )
    add_options(parser, available_options("plan"))
    return parser


def _share(text: str) -> float:
    """Parse a share above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1: got {text!r}")
    return value


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
    setup = plan.setup
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
    elif advice.plan.fits:
        setup = advice.plan.setup
        lines += [f"feasible settings: {advice.flags}", summary(plan_memory(with_budget(setup)))]
    else:
        lines.append(
            f"nor does what the other options give fit ({advice.flags}; "
            f"{'; '.join(advice.plan.problems)}): more or larger GPUs, a shorter "
            "generate_max_len, or --lora_rank"
        )
    single = [] if plan.fits else remedies(plan.setup)
    lines += [f"  {number}. {text}" for number, text in enumerate(single, start=1)]
    return "\n".join(lines + (_seconds(setup, gpu) if setup.rolls_out else []))


def _seconds(setup: Setup, gpu: Gpu) -> list[str]:
    """Return the part of the report about time."""
    rows = scale(setup, gpu, COUNTS)
    now, *faster = forms(setup, gpu)
    return [
        "",
        time_table(rows),
        where_it_stops_paying(setup, rows),
        *(f"{now.seconds / each.seconds:.1f} times as fast: {each.flags}" for each in faster),
        f"GPU: NVIDIA {gpu.source}.",
    ]


def time_table(rows: Sequence[StepSeconds]) -> str:
    """Return a Markdown table with a line for each number of GPUs, after a line on its accuracy."""
    names = (*rows[0].phases, "total")
    lines = [
        f"Estimated seconds of a step, computed and not timed: {measured_count()}, the others are "
        "assumed (docs/scaling.md).",
        "",
        "| GPUs | memory | " + " | ".join(names) + " | efficiency |",
        "|" + "---:|" * (len(names) + 3),
    ]
    for row, share in zip(rows, efficiency(rows), strict=True):
        cells = ["too large", *[""] * len(names), ""]
        if share is not None and row.memory_bytes is not None:
            seconds = (*row.phases.values(), row.total)
            # Two digits: an estimate has no more.
            rough = (f"{round(float(f'{value:.2g}'), 2):g}" for value in seconds)
            cells = [gigabytes(row.memory_bytes), *rough, f"{share:.0%}"]
        lines.append(f"| {row.num_gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
