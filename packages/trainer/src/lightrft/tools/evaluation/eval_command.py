"""`lightrft eval`: evaluation of a model on held-out prompts, greedy and with several samples."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, PreflightError, refuse, run_guarded
from lightrft.cli.launch import (
    become_only_process,
    end_with_launcher,
    hide_progress_bars,
    is_worker,
    launch,
    share_processors,
)
from lightrft.cli.options import Parser, add_options, parse_options
from lightrft.cli.preflight import (
    check_data,
    device_problems,
    engine_problems,
    found_columns,
    model_problems,
    no_reward,
)
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.other_names import A_DATA_FILE
from lightrft.config.train_config import command_options
from lightrft.reporting.files import CONFIG_FILE
from lightrft.reporting.start_bar import start_text
from lightrft.tools.commands import parser_of
from lightrft.tools.evaluation.evaluation_run import EvalResult, EvalSettings
from lightrft.tools.init_model_command import require_empty


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft eval --help`.

    Raises:
        ConfigError: Options are not valid; one line for each problem.
        UsageError: The arguments cannot be parsed, or the target is not empty.
        PreflightError: The engine or GPUs are missing.
        DataError: The prompts cannot be read.
    """
    config, settings, nproc_per_node = parse(argv)
    share_processors()
    if is_worker():
        end_with_launcher()
    else:
        require_empty(Path(config.output_dir))
        missing = engine_problems(config.engine_type) + device_problems(nproc_per_node)
        refuse(missing, PreflightError)
        check_data(config)
        if nproc_per_node > 1:
            return launch(
                "lightrft.tools.evaluation.eval_command", argv, nproc_per_node=nproc_per_node
            )
        become_only_process()
    from lightrft.tools.evaluation.evaluation_run import run_evaluation

    hide_progress_bars()
    start_text("lightrft eval: models and engine")
    result = run_evaluation(config, settings)
    if os.environ["RANK"] == "0":
        print(format_table(result))
        print(f"wrote {Path(config.output_dir) / 'eval.json'}")
        if settings.rates is not None:
            print(f"wrote {settings.rates}: the pass rates of {result.num_prompts} prompts")
    return ExitCode.OK


def parse(argv: Sequence[str]) -> tuple[TrainConfig, EvalSettings, int]:
    """Return the options, the settings of the evaluation, and the number of processes on this node.

    Raises:
        ConfigError: Names are unknown, values wrong or files missing; one error lists all.
        UsageError: The arguments cannot be parsed.
    """
    config, parsed, problems = parse_options(build_parser(), argv, first_files=_run_options)
    settings = EvalSettings(
        parsed.num_samples,
        tuple(parsed.pass_k),
        parsed.threshold,
        vars(parsed).get("held_out"),
        vars(parsed).get("rates"),
    )
    if settings.rates is not None and "max_eval_samples" not in config.explicit:
        config.max_eval_samples = TrainConfig.max_samples
    is_run = bool(_run_options(parsed))
    model = Path(parsed.model, "model") if is_run else Path(parsed.model)
    config.pretrain, config.fsdp = str(model), True
    problems += settings.problems()
    if settings.held_out is not None and not config.save_rollouts:
        problems.append("--held_out is of the rows of --save_rollouts: add that, or leave it out")
    problems += model_problems("MODEL", str(model))
    for path in config.reward_pretrain:
        problems += model_problems("--reward_pretrain", path)
    if config.eval_data is None:
        problems.append(f"--eval_data is missing: {A_DATA_FILE}")
    refuse(problems + no_reward(config), ConfigError)
    says = not is_worker()
    config = config.replaced(found_columns(config, config.eval_data, config.eval_split, says=says))
    config.prompt_data = None  # only the evaluation's prompts are read
    # Nothing is trained: choose batch sizes that fit any number of processes.
    world_size = int(os.environ.get("WORLD_SIZE", parsed.nproc_per_node))
    config.micro_train_batch_size, config.train_batch_size = 1, world_size
    return config, settings, parsed.nproc_per_node


def _run_options(parsed: argparse.Namespace) -> list[Path]:
    """Return the file with the run's options if MODEL is a run, else nothing."""
    path = Path(parsed.model, CONFIG_FILE)
    return [path] if path.is_file() else []


def build_parser() -> Parser:
    """Return the parser of `lightrft eval`; unset options are missing in its result."""
    parser = parser_of("eval", takes_options=True)
    add_options(parser, command_options("eval"))
    return parser


def format_table(result: EvalResult) -> str:
    """Return the metrics, one line each, with their standard error over prompts."""
    shown = {name: value for name, value in result.metrics.items() if "/stderr" not in name}
    width = max(map(len, shown))
    lines = [f"{'metric':{width}}  {'value':>9}  {'± error':>9}"]
    for name, value in shown.items():
        error = result.metrics.get(f"{name}/stderr")
        lines.append(f"{name:{width}}  {value:>9.4f}  {'' if error is None else f'{error:>9.4f}'}")
    return "\n".join([f"{result.num_prompts} prompts", *(line.rstrip() for line in lines)])


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft eval", lambda: run(sys.argv[1:])))
