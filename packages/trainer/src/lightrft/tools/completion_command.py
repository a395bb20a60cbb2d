"""`lightrft completion`: a script by which a shell completes commands, flags and values."""

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import cast

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.main import COMMANDS, Command
from lightrft.cli.options import Parser, available_options
from lightrft.cli.train import StageCommand
from lightrft.config.options import did_you_mean

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """\
Print a completion script. bash: eval "$(lightrft completion bash)" in ~/.bashrc; zsh: write it to
a file _lightrft in a folder of $fpath; fish: write it to ~/.config/fish/completions/lightrft.fish.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft completion --help`.

    Raises:
        UsageError: An unknown shell.
    """
    shell = build_parser().parse_args(argv).shell
    if shell not in SHELLS:
        raise UsageError(f"unknown shell {shell!r}{did_you_mean(shell, SHELLS)}")
    import shtab

    print(shtab.complete(whole_parser([*COMMANDS, *COMMANDS.installed]), shell))
    return ExitCode.OK


def build_parser() -> Parser:
    """Return the parser of `lightrft completion`."""
    parser = Parser("completion", DESCRIPTION)
    parser.add_argument("shell", metavar="SHELL", help=f"{', '.join(SHELLS)}.")
    return parser


def whole_parser(names: Collection[str]) -> argparse.ArgumentParser:
    """Return one parser of commands, from `build_parser` or `build_parsers` of their modules.

    Args:
        names: Names of the commands.
    """
    root = argparse.ArgumentParser(prog="lightrft")
    root.add_argument("--version", action="store_true")
    commands = root.add_subparsers()
    for name in names:
        parsers = _parsers(cast("Command", COMMANDS.load(name)))
        for parser in parsers:
            _prepare(parser)
        # prog is "lightrft COMMAND" or "lightrft COMMAND ACTION".
        actions = [parser.prog.split()[2:] for parser in parsers]
        if actions == [[]]:
            # shtab leaves out a command without help.
            commands.add_parser(name, parents=parsers, add_help=False, help=name)
            continue
        nested = commands.add_parser(name, help=name).add_subparsers()
        for parser, action in zip(parsers, actions, strict=True):
            nested.add_parser(action[0], parents=[parser], add_help=False, help=action[0])
    return root


def _parsers(command: Command) -> list[argparse.ArgumentParser]:
    """Return the parsers of a command; where its module builds none, only its name is known."""
    if isinstance(command, StageCommand):
        return [command.build_parser()]
    module = vars(sys.modules[command.__module__])
    if "build_parsers" in module:
        return cast("list[argparse.ArgumentParser]", module["build_parsers"]())
    if "build_parser" in module:
        return [cast("argparse.ArgumentParser", module["build_parser"]())]
    return [argparse.ArgumentParser("lightrft command", add_help=False)]


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Give actions the values that a shell may offer."""
    import shtab

    options = available_options()
    for action in parser._actions:
        info = options.get(action.dest)
        if info is not None and info.choices and action.nargs != 0:
            action.choices = list(map(str, info.choices))
        elif info is not None and info.path == "folder":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in ("config", "source") or (info is not None and info.path == "file"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
