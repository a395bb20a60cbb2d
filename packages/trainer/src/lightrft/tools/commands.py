"""Parsers of the commands that `commands.toml` describes."""

import argparse
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from lightrft.cli.options import Parser, at_least, finite


def share(text: str) -> float:
    """Convert an argument to a number above 0, at most 1."""
    value = finite(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1: got {text!r}")
    return value


_COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
_TYPES = {"int": int, "finite": finite, "share": share}


def parser_of(
    command: str,
    choices: Mapping[str, Iterable[object]] = MappingProxyType({}),
    *,
    takes_options: bool = False,
    **words: str,
) -> Parser:
    """Return the parser of a command.

    Args:
        command: Words after `lightrft`.
        choices: Choices of flags that only the command knows.
        takes_options: Whether options of a run are added: flags without a default then leave no
            trace where they are not set.
        words: Texts in place of `{name}` in the description and the help.
    """
    described = _COMMANDS[command]
    default = argparse.SUPPRESS if takes_options else None
    about, usage = described["about"].format(**words), described.get("usage")
    parser = Parser(command, about, usage=usage, argument_default=default)
    groups: dict[str, argparse._ActionsContainer] = {
        title: parser.add_argument_group(title) for title in described.get("groups", ())
    }
    for title in described.get("exclusive", ()):
        groups[title] = parser.add_mutually_exclusive_group()
    for name, flag in described["flags"].items():
        settings = {**flag, "help": flag["help"].format(**flag, **words)}
        if name in choices:
            settings["choices"] = tuple(choices[name])
        if "lowest" in settings:
            whole = at_least(settings.pop("lowest"), settings.pop("highest", None))
            settings = {"metavar": "N", **settings, "type": whole}
        elif "type" in settings:
            settings["type"] = _TYPES[settings["type"]]
        groups.get(settings.pop("group", ""), parser).add_argument(name, **settings)
    return parser
