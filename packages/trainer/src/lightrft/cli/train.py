"""`lightrft train`: options, checks of the input, processes, and then the run itself."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightrft.cli.errors import (
    ExitCode,
    MemoryExhaustedError,
    PreflightError,
    is_out_of_memory,
    memory_report,
    refuse,
    run_guarded,
)
from lightrft.cli.launch import (
    become_only_process,
    end_with_launcher,
    is_worker,
    launch,
    share_processors,
)
from lightrft.cli.options import (
    Parser,
    add_number,
    add_options,
    available_options,
    normalise,
    parse_options,
)
from lightrft.config import ConfigError, RunControlOptions, TrainConfig
from lightrft.config.train_config import launch_problems
from lightrft.reporting.files import note_interruption
from lightrft.reporting.start_bar import end_start_bar, start_text
from lightrft.strategy.distributed.process_end import StopRequest

EPILOG = """\
Boolean options have a negative form, --no_NAME. Options may stand in TOML files as well
(--config a.toml b.toml): later files win over earlier ones, flags over files.

exit codes: 0 done, 1 unexpected error, 2 usage, 3 not possible on this machine, 4 data, 5 reward
function, 6 out of memory, 7 deadline, 8 verification of weights or logprobs, 9 ended by an alarm
(--stop_on_alarm) or by numbers that are not finite, 75 stopped by SIGTERM or SIGUSR1 with a
checkpoint (the same command continues), 130 interrupted, 143 stopped before anything was done
"""


# Returns problems of a configuration for a number of processes, a line each.
ProblemsOf = Callable[[TrainConfig, int], list[str]]
# Converts read options, their words, and the problems so far into the configuration and the
# number of processes.
ParseRead = Callable[[TrainConfig, argparse.Namespace, list[str]], tuple[TrainConfig, int]]


@dataclass(frozen=True, slots=True)
class StageCommand:
    """A command that trains.

    Args:
        name: Name of the command.
        description: Purpose, for its help.
        parse_read: Function that completes and checks read options; None does so for rows.
        words: Module that the processes of a run execute, and arguments before those of the user;
            () executes `row_commands`.
        stage: Function of the options for the name in `config.registry.STAGES`; None is the
            command's.
        check: Function that checks what needs no model; it raises errors.
        next_commands: Function of folder and model of the run for the last lines.
    """

    name: str
    description: str
    parse_read: ParseRead | None = None
    words: tuple[str, ...] = ()
    stage: Callable[[TrainConfig], str] | None = None
    check: Callable[[TrainConfig], None] = lambda _: None
    next_commands: Callable[[str, str], str] | None = None

    def build_parser(self, *, lists_all: bool = True) -> Parser:
        """Build the parser; options that are not set leave no trace.

        Args:
            lists_all: Otherwise it has only the options that most runs set.
        """
        return stage_parser(self.name, self.description, lists_all=lists_all)

    def parse(self, argv: Sequence[str]) -> tuple[TrainConfig, int]:
        """Read the configuration and the number of processes on this node.

        Raises:
            ConfigError: Unknown names, wrong values, missing files; all of them at once.
            UsageError: Arguments that cannot be read.
        """
        parse_read = self.parse_read or partial(parse_rows, command=self.name)
        return parse_read(*parse_options(self.build_parser(), argv))

    def __call__(self, argv: Sequence[str]) -> int:
        """Run the command.

        Raises:
            ConfigError: Options that cannot be run; one line for each problem.
            UsageError: Arguments that cannot be read.
            PreflightError: This machine lacks what the run needs.
            DataError: Prompts or rows that cannot be read.
            RewardError: A reward function that cannot be called.
        """
        # Imports after the parser's work, so that --help is fast.
        arguments = normalise(argv)
        wants_short_help = {"-h", "--help"} & set(arguments) and "--help_all" not in arguments
        self.build_parser(lists_all=not wants_short_help).parse_known_args(arguments)
        from lightrft.cli.preflight import environment_problems, machine_problems

        refuse(environment_problems(), PreflightError)
        stop_request, is_launched = StopRequest(), is_worker()
        with ExitStack() as stack:
            if is_launched:
                end_with_launcher()
                # Before the imports that take seconds: a signal must not end a rank alone.
                stack.enter_context(stop_request.listening())
            config, nproc_per_node = self.parse(argv)
            share_processors()
            stage = self.stage(config) if self.stage else self.name
            from lightrft.run.resume import plan_run

            # Also on ranks that only generate: each refuses before any waits for the others.
            plan = plan_run(config, stage)
            if not is_launched:
                from lightrft.datasets.files import forget_rows

                refuse(machine_problems(config, nproc_per_node), PreflightError)
                stack.callback(forget_rows)
                self.check(config)
                stack.enter_context(interruption_explained(config))
                if nproc_per_node > 1:
                    forget_rows()
                    end_start_bar()
                    module, *before = self.words or ("lightrft.cli.row_commands", self.name)
                    return launch(module, [*before, *argv], nproc_per_node=nproc_per_node)
                become_only_process()
                stack.enter_context(stop_request.listening())
            start_text("lightrft: loading libraries and data")
            from lightrft.run.assembly import run_training

            stack.enter_context(lack_of_memory_explained(config))
            summary = run_training(config, stage=stage, stop_request=stop_request, plan=plan)
            if os.environ["RANK"] == "0":
                following = self.next_commands or next_after_rows
                print(following(summary.output_dir, summary.model_dir), flush=True)
        return ExitCode.OK


def check(config: TrainConfig) -> None:
    """Check data, rewards and algorithm, without a model; errors as for `run`."""
    from lightrft.cli.preflight import check_algorithm, check_data, check_reward

    start_text("lightrft: loading libraries, data and rewards")
    check_reward(config, check_data(config, keeps=True))
    check_algorithm(config)


@contextmanager
def lack_of_memory_explained(config: TrainConfig) -> Iterator[None]:
    """Add to an exception for lack of memory its phase and remedies."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            from lightrft.strategy.distributed.deadlines import phase_of

            raise MemoryExhaustedError(memory_report(error, phase_of(error), config)) from error
        raise


def next_commands(output_dir: str, model_dir: str) -> str:
    """Return the place of the trained model, and the commands that come next."""
    run = shlex.quote(output_dir)
    return (
        f"model    {model_dir}\n"
        f"next     lightrft report {run}\n"
        f"         lightrft eval {run} --num_samples 4\n"
        f"         lightrft export {run} {shlex.quote(f'{output_dir}_exported')}"
    )


def next_after_rows(output_dir: str, model_dir: str) -> str:
    """Return the place and commands after training on rows, without prompts to evaluate."""
    run, exported = map(shlex.quote, (output_dir, f"{output_dir}_exported"))
    return (
        f"model    {model_dir}\nnext     lightrft report {run}\n"
        f"         lightrft export {run} {exported}"
    )


@contextmanager
def interruption_explained(config: RunControlOptions) -> Iterator[None]:
    """Record an interruption (Ctrl-C) in the run; its message says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        from lightrft.strategy.checkpoints.manifest import checkpoint_folders

        note_interruption(Path(config.output_dir))
        steps = [
            path.name.removeprefix("global_step")
            for path in checkpoint_folders(config.checkpoint_dir / "_actor")
        ]
        saved = max((int(step) for step in steps if step.isdecimal()), default=None)
        what = (
            f"continues after step {saved}"
            if saved is not None
            else "starts over, since there is no checkpoint yet (--save_steps)"
        )
        raise KeyboardInterrupt(f"interrupted: the same command {what}") from None


def parse_policy(
    config: TrainConfig, parsed: argparse.Namespace, problems: list[str]
) -> tuple[TrainConfig, int]:
    """Complete and check options of reinforcement learning; errors as for `StageCommand.parse`."""
    processes: int = parsed.nproc_per_node
    if not problems:
        from lightrft.cli.preflight import check_paths, found_columns

        says = not is_worker()
        config = config.replaced(
            found_columns(config, config.prompt_data, config.prompt_split, says=says)
        )
        world_size = int(os.environ.get("WORLD_SIZE", processes))
        try:
            config = config.overlapped(world_size)
        except ConfigError as error:
            problems.append(str(error))
        problems += launch_problems(config, world_size)
        problems += check_paths(config)
        problems += config.unused_options() if config.strict else []
    refuse(problems, ConfigError)
    return config, processes


def parse_rows(
    config: TrainConfig,
    parsed: argparse.Namespace,
    problems: list[str],
    *,
    command: str,
    problems_of: ProblemsOf | None = None,
) -> tuple[TrainConfig, int]:
    """Complete and check options of training on rows; errors as for `StageCommand.parse`.

    Args:
        config, parsed, problems: See `parse_options`.
        command: Name of the command.
        problems_of: Function that checks valid options for a number of processes; None runs the
            check that all such commands share.
    """
    if not problems:
        from lightrft.cli.preflight import model_problems
        from lightrft.stages.rows.row_inputs import option_problems

        world_size = int(os.environ.get("WORLD_SIZE", parsed.nproc_per_node))
        if problems_of is None:
            problems += option_problems(config, world_size, command)
        else:
            problems += problems_of(config, world_size)
        if config.pretrain is not None:
            problems += model_problems("--pretrain", config.pretrain)
        problems += config.unused_options() if config.strict else []
    refuse(problems, ConfigError)
    return config, parsed.nproc_per_node


def stage_parser(command: str, description: str, *, lists_all: bool) -> Parser:
    """Return the parser of a stage's command; options that are not set leave no trace."""
    parser = Parser(
        command,
        description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--help_all", "--help-all", action="help", help="List all options.")
    add_number(parser, "--nproc_per_node", "Processes to start on this machine.", default=1)
    options = available_options(command)
    add_options(parser, [name for name, info in options.items() if lists_all or info.common])
    return parser


TRAIN = StageCommand(
    "train",
    "Fine-tune a language model by reinforcement learning.",
    parse_policy,
    ("lightrft.cli.train",),
    lambda _: "policy",
    check,
    next_commands,
)
run, build_parser = TRAIN, TRAIN.build_parser


if __name__ == "__main__":
    sys.exit(run_guarded("lightrft train", lambda: run(sys.argv[1:])))
