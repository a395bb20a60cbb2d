"""Parsers of the commands that `commands.toml` describes."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from lightrft.cli.options import Parser, at_least, finite

_COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
_TYPES = {"int": int, "finite": finite}


def parser_of(
    command: str, choices: Mapping[str, Iterable[object]] = MappingProxyType({}), **words: str
) -> Parser:
    """Return the parser of a command.

    Args:
        command: Words after `lightrft`.
        choices: Choices of flags that only the command knows.
        words: Texts in place of `{name}` in the description and the help.
    """
    described = _COMMANDS[command]
    parser = Parser(command, described["about"].format(**words), usage=described.get("usage"))
    for name, flag in described["flags"].items():
        settings = {**flag, "help": flag["help"].format(**flag, **words)}
        if name in choices:
            settings["choices"] = tuple(choices[name])
        if "lowest" in settings:
            whole = at_least(settings.pop("lowest"), settings.pop("highest", None))
            settings = {"metavar": "N", **settings, "type": whole}
        elif "type" in settings:
            settings["type"] = _TYPES[settings["type"]]
        parser.add_argument(name, **settings)
    return parser
