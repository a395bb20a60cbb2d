"""Command-line flags and TOML files, both made from the fields of `TrainConfig`."""

from __future__ import annotations

import argparse
import typing
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING

from lightrft.cli.errors import UsageError
from lightrft.cli.values import convert
from lightrft.trainer.config import TrainConfig, unknown_name
from lightrft.trainer.config_files import read_toml
from lightrft.trainer.config_unavailable import UNAVAILABLE
from lightrft.utils.flags import shape_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from lightrft.utils.flags import FlagShape

GROUPS = (
    "models", "data", "reward", "rollout", "algorithm", "training", "distributed", "engine",
    "run", "monitoring",
)  # fmt: skip


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def available_fields() -> list[Field[object]]:
    """The fields of `TrainConfig` that are options, in the order of their groups."""
    options = [
        entry
        for entry in fields(TrainConfig)
        if "group" in entry.metadata and entry.name not in UNAVAILABLE
    ]
    return sorted(options, key=lambda entry: GROUPS.index(entry.metadata["group"]))


def add_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add one flag for every option, grouped; flags that are not given leave no trace.

    Args:
        parser: Gets the flags.
        names: Options to add; None adds all.
    """
    hints = typing.get_type_hints(TrainConfig)
    chosen = [entry for entry in available_fields() if names is None or entry.name in names]
    used = {entry.metadata["group"] for entry in chosen}
    groups = {name: parser.add_argument_group(name) for name in GROUPS if name in used}
    for entry in chosen:
        _add_option(groups[entry.metadata["group"]], entry, shape_of(entry.name, hints[entry.name]))


def merge_options(
    files: Sequence[Path], flags: Mapping[str, object]
) -> tuple[TrainConfig, list[str]]:
    """The options of some TOML files, left to right, and then the flags, with all problems.

    Raises:
        UsageError: A file does not exist.
        ConfigError: A file is not TOML.
    """
    known = {entry.name for entry in available_fields()}
    problems: list[str] = []
    values: dict[str, object] = {}
    for path in files:
        if not path.is_file():
            raise UsageError(f"--config: no such file: {path}")
        for name, value in read_toml(path).items():
            if name in known:
                values[name] = value
            else:
                problems.append(f"{path}: {unknown_name(name)}")
    config = TrainConfig()
    hints = typing.get_type_hints(TrainConfig)
    for name, value in {**values, **flags}.items():
        setattr(config, name, convert(value, hints[name]))
    return config, problems + config.problems()


def unknown_flags(arguments: Sequence[str]) -> list[str]:
    """Sentences about what the parser did not know; values after an unknown flag are its own."""
    flags = [argument for argument in arguments if argument.startswith("--")]
    if not flags:
        return [f"unexpected argument {argument!r}" for argument in arguments]
    return [unknown_name(flag.removeprefix("--").split("=")[0]) for flag in flags]


def normalise(arguments: Sequence[str]) -> list[str]:
    """Spell --some-flag=x as --some_flag=x, so that both forms work."""
    return [
        "--" + "=".join([name.replace("-", "_"), *value]) if argument.startswith("--") else argument
        for argument in arguments
        for name, *value in [argument.removeprefix("--").split("=", 1)]
    ]


def _add_option(group: argparse._ArgumentGroup, entry: Field[object], shape: FlagShape) -> None:
    """Add the flag of one field; values stay texts, so that all that are wrong are told at once."""
    flag, text, metavar = f"--{entry.name}", _help(entry), _METAVARS[shape.item]
    if shape.form == "switch":
        group.add_argument(flag, action="store_const", const=True, help=text)
        group.add_argument(
            *shape.opposites,
            dest=entry.name,
            action="store_const",
            const=False,
            help="Do not." if entry.default else argparse.SUPPRESS,
        )
    elif shape.form == "pairs":
        # Several of them may come at once, or one after each of several flags.
        group.add_argument(
            flag, flag.removesuffix("s"), action="extend", nargs="+", metavar="KEY=VALUE", help=text
        )
    elif shape.form == "value or switch":
        group.add_argument(flag, nargs="?", const=True, metavar=metavar, help=text)
    else:
        group.add_argument(flag, nargs=shape.count, metavar=metavar, help=text)


def _help(entry: Field[object]) -> str:
    parts = [entry.metadata["help"]]
    choices = entry.metadata.get("choices")
    if choices:
        parts.append("One of " + ", ".join(str(choice).lower() for choice in choices) + ".")
    if entry.default not in (None, False, (), MISSING):
        parts.append(f"Default: {_shown(entry.default)}.")
    return " ".join(parts).replace("%", "%%")


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
