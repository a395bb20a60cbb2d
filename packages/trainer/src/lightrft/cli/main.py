"""The `lightrft` command: the table of commands, of which only the chosen one is imported.

A command is a function of its arguments that returns an exit code. Packages add theirs by entry
points of the group `lightrft.commands`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from lightrft.cli.errors import PreflightError, UsageError, run_guarded
from lightrft.config.options import ConfigError, did_you_mean
from lightrft.config.registry import Registry, installation_of, missing_module, package_of
from lightrft.reporting.start_bar import start_bar

# Commands with their purpose, by the heading of `lightrft --help`.
DESCRIPTIONS = {
    "begin": {
        "init-run": "write model, prompts, reward and options of a run to edit",
        "quickstart": "make a complete run in a minute on a CPU",
        "init-model": "write a tiny model with random weights",
        "doctor": "check this machine, and a model if you name one",
    },
    "train": {
        "train": "fine-tune a language model by reinforcement learning",
        "sft": "fine-tune a language model on texts, answers or conversations",
        "prefer": "fine-tune a language model on preferences between answers",
        "reward": "train a reward model on pairs of answers or labelled ones",
        "distill": "train a model towards a teacher, on its samples or rows",
    },
    "before a run": {
        "data": "check a file of prompts: layout, lengths, bad rows, answers",
        "plan": "predict the memory of a run; needs no GPU",
        "config": "show or convert options",
        "launch": "print what starts a run on several nodes",
    },
    "after a run": {
        "report": "write an HTML page of a run: curves, times, samples",
        "eval": "evaluate a model on held-out prompts: avg@n, pass@k",
        "export": "copy the final model as a checked HF checkpoint",
        "rows": "make rows for sft, prefer or reward from a run's samples",
        "audit": "recompute a step of a run in float64 and compare",
        "replay": "sample a step's episodes again from its journal",
    },
    "beside runs": {
        "serve": "serve a model as agents see it in training",
        "serve-reward": "serve a reward function over HTTP",
        "completion": "print completions of commands and flags for a shell",
    },
}
COMMANDS = Registry(
    "command",
    {
        "train": "lightrft.cli.train:run",
        "sft": "lightrft.cli.row_commands:sft",
        "reward": "lightrft.cli.row_commands:reward",
        "prefer": "lightrft.cli.row_commands:prefer",
        "distill": "lightrft.cli.row_commands:distill",
        "quickstart": "lightrft.tools.quickstart.quickstart_command:run",
        "data": "lightrft.tools.data.data_command:run",
        "rows": "lightrft.tools.rows.rows_command:run",
        "eval": "lightrft.tools.evaluation.eval_command:run",
        "launch": "lightrft.tools.launch_command:run",
        "serve": "lightrft.tools.serve.serve_command:run",
        "serve-reward": "lightrft.tools.rewards.serve_reward_command:run",
        "report": "lightrft.tools.report.report_command:run",
        "audit": "lightrft.tools.audit_command:run",
        "replay": "lightrft.tools.replay.replay_command:run",
        "export": "lightrft.tools.export.export_command:run",
        "plan": "lightrft.tools.plan.plan_command:run",
        "doctor": "lightrft.tools.doctor.doctor_command:run",
        "config": "lightrft.tools.config_command:run",
        "completion": "lightrft.tools.completion_command:run",
        "init-model": "lightrft.tools.init_model_command:run",
        "init-run": "lightrft.tools.init_run_command:run",
    },
    takes_own=False,
    group="lightrft.commands",
)
Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`lightrft.cli.errors.ExitCode`).

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_guarded("lightrft", partial(_dispatch, arguments))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version"):
        # Imported here: it costs more than the rest of `lightrft --help`.
        from lightrft.reporting.files import package_versions

        print("lightrft", package_versions(["lightrft-trainer"]).get("lightrft-trainer", "unknown"))
        return 0
    if name not in COMMANDS:
        known = [*COMMANDS, *COMMANDS.installed]
        raise UsageError(f"unknown command {name!r}{did_you_mean(name, known)}")
    with start_bar(f"lightrft {name}"):
        command = _load(name)
        try:
            return command(rest)
        except ImportError as error:
            _refuse_missing(name, error, error)
            raise


def _load(name: str) -> Command:
    try:
        return cast("Command", COMMANDS.load(name))
    except ConfigError as error:
        _refuse_missing(name, error.__cause__, error)
        raise


def _refuse_missing(command: str, reason: BaseException | None, error: Exception) -> None:
    """Raise a PreflightError if an error comes from a package that is not installed."""
    module = missing_module(reason)
    if module is not None:
        raise PreflightError(
            f"lightrft {command} needs the package {module}, which is not installed: "
            f"{installation_of(module)}"
        ) from error


def usage() -> str:
    """Return the text of `lightrft --help`."""
    installed = {
        name: f"of the package {package_of(point)}" for name, point in COMMANDS.installed.items()
    }
    groups = DESCRIPTIONS | ({"of other packages": installed} if installed else {})
    width = max(len(name) for group in groups.values() for name in group)
    lines = ["usage: lightrft COMMAND [OPTIONS]", ""]
    for heading, group in groups.items():
        lines += [f"{heading}:", *(f"  {name:{width}}  {group[name]}" for name in group), ""]
    return "\n".join(
        [
            *lines,
            "lightrft COMMAND --help explains one command; lightrft --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
