"""The `lightrft` command: finds the subcommand and imports only what that one needs."""

import importlib
import sys
from collections.abc import Sequence

from lightrft.cli.errors import UsageError, run_guarded
from lightrft.config.options import did_you_mean

_TOOLS = "lightrft.tools"
COMMANDS = {
    "quickstart": (f"{_TOOLS}.quickstart.command", "a complete run in a minute on a CPU"),
    "train": ("lightrft.cli.train", "fine-tune a language model by reinforcement learning"),
    "data": (
        f"{_TOOLS}.data.command",
        "check a file of prompts: layout, lengths, bad rows, answers",
    ),
    "eval": (
        f"{_TOOLS}.evaluation.command",
        "a model on held-out prompts: greedy, avg@n, pass@k",
    ),
    "launch": (f"{_TOOLS}.launch.command", "print what starts a run on several nodes"),
    "serve-reward": (f"{_TOOLS}.rewards.serve_command", "serve a reward function over HTTP"),
    "report": (
        f"{_TOOLS}.report.command",
        "one HTML page about a run: curves, times, samples, options",
    ),
    "audit": (f"{_TOOLS}.audit_command", "recompute a step of a run in float64 and compare"),
    "replay": (f"{_TOOLS}.replay.command", "sample a step's episodes again from its journal"),
    "export": (
        f"{_TOOLS}.export.command",
        "the final model of a run as a checked HF checkpoint",
    ),
    "plan": (
        f"{_TOOLS}.plan.command",
        "memory and seconds of a run on given GPUs, without any",
    ),
    "doctor": (
        f"{_TOOLS}.doctor.command",
        "whether this machine can train, and a model exactly",
    ),
    "config": (
        f"{_TOOLS}.config_command",
        "options as they come out, compared, or as a schema",
    ),
    "completion": (f"{_TOOLS}.completion", "completion of commands and flags for a shell"),
    "init-model": (f"{_TOOLS}.init_model", "write a tiny model with random weights"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`lightrft.cli.errors.ExitCode`).

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_guarded("lightrft", lambda: _dispatch(arguments))


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
        raise UsageError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}")
    command = importlib.import_module(COMMANDS[name][0])
    code: int = command.run(rest)
    return code


def usage() -> str:
    """The text of `lightrft --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightrft COMMAND [OPTIONS]",
            "",
            "commands:",
            *lines,
            "",
            "lightrft COMMAND --help explains one command; lightrft --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
