"""`lightrft plan`: memory and seconds of a run on given GPUs, without any of them."""

import argparse
from collections.abc import Sequence

from lightrft.cli.errors import ExitCode, refuse
from lightrft.cli.options import Parser, add_number, add_options, available_options, parse_options
from lightrft.config import ConfigError
from lightrft.run.gpus import GPUS, find_gpu
from lightrft.tools.plan.model_size import SHAPES, read_model_size
from lightrft.tools.plan.plan_report import full_report
from lightrft.tools.plan.setup import Setup

GPUS_PER_NODE = 8
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
    refuse(problems, ConfigError)
    gpu = find_gpu(parsed.gpu)
    setup = Setup(
        config=config,
        actor_size=read_model_size(str(config.pretrain)),
        world_size=parsed.gpus,
        ranks_per_node=min(parsed.gpus, parsed.gpus_per_node),
        has_gpu=True,
        capacity_bytes=gpu.memory_bytes,
        engine=ON_A_GPU.get(config.engine_type, config.engine_type),
    )
    text, fits = full_report(setup, gpu)
    print(text)
    return ExitCode.OK if fits else ExitCode.OUT_OF_MEMORY


def build_parser() -> Parser:
    """The parser of `lightrft plan`."""
    parser = Parser(
        "plan",
        "Predict memory and seconds of a run from its options, a model's configuration and the "
        "data sheets of GPUs. Exit code 6 if no settings are found that fit. Takes the options of "
        "lightrft train; --pretrain is a model directory or one of: " + ", ".join(SHAPES) + ".",
        argument_default=argparse.SUPPRESS,
    )
    add_number(parser, "--gpus", "GPUs, one rank each.", default=1)
    add_number(parser, "--gpus_per_node", "GPUs of a node.", default=GPUS_PER_NODE)
    parser.add_argument(
        "--gpu", default="h100-80g", metavar="NAME", help="One of: " + ", ".join(GPUS) + "."
    )
    add_options(parser, list(available_options()))
    return parser
