"""Flags and TOML files of the commands, merged into one `TrainConfig`."""

import argparse
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lightrft.cli.errors import UsageError
from lightrft.config import TrainConfig
from lightrft.config.options import (
    OptionInfo,
    coerce,
    options_of,
    type_hints,
)
from lightrft.config.other_names import (
    NAMES_OF_COMMANDS,
    SWITCHES,
    TABLE_HINT,
    UNAVAILABLE,
    option_hint,
    said_once,
    same_option,
    taken_as,
    with_our_names,
    without_switches,
)
from lightrft.config.toml import read_toml
from lightrft.config.train_config import command_options, is_training, refusal
from lightrft.utils.arguments import add_arguments, from_text


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving the process, and abbreviates nothing.

    Args:
        command: Words after `lightrft`.
        description: Purpose of the command.
        settings: Further arguments of argparse.
    """

    def __init__(self, command: str, description: str, **settings: object) -> None:
        self.command = command
        super().__init__(
            f"lightrft {command}",
            description=description,
            allow_abbrev=False,
            **settings,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as an error."""
        raise UsageError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True, slots=True)
class at_least:  # noqa: N801 - a type of argument reads like a function
    """A type of argument: whole numbers from `lowest`, to `highest` where there is one."""

    lowest: int
    highest: int | None = None

    def __call__(self, text: str) -> int:
        """Return the number in `text`."""
        highest = 10**19 if self.highest is None else self.highest
        is_whole = text.lstrip("+-").isdecimal() and len(text) < 20
        if is_whole and self.lowest <= int(text) <= highest:
            return int(text)
        bounds = f">= {self.lowest}" + (f" and <= {highest}" if self.highest else "")
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number {bounds}")


def finite(text: str) -> float:
    """Convert an argument to a number that is neither NaN nor infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number")
    return number


def add_number(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    default: int,
    lowest: int = 1,
) -> None:
    """Add a flag that takes a whole number.

    Args:
        parser: Parser, or one of its groups.
        flag: Flag with its dashes.
        text: Help, to which the default is added.
        default: Value without the flag.
        lowest: Smallest number that is accepted.
    """
    parser.add_argument(
        flag,
        default=default,
        type=at_least(lowest),
        metavar="N",
        help=f"{text} Default: {default}.",
    )


def available_options(command: str = "train") -> dict[str, OptionInfo]:
    """Return the options of a training command, for its command line and TOML files, by name.

    Other commands read the files of all.
    """
    options = options_of(TrainConfig)
    taken = command_options(command) if is_training(command) else options
    return {n: options[n][1] for n in options if n in taken and n not in UNAVAILABLE}


def add_options(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add --config and the flags of options; flags that are not set leave no trace."""
    parser.add_argument(
        "--config",
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE.toml",
        help="Files with options.",
    )
    add_arguments(parser, config_type=TrainConfig, names=names, as_text=True)
    for name, (option, _) in SWITCHES.items():
        if option in names:
            parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)


def parse_options(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    *,
    first_files: Callable[[argparse.Namespace], Sequence[Path]] = lambda _: (),
) -> tuple[TrainConfig, argparse.Namespace, list[str]]:
    """Return a command line's options with its files, the command's other arguments, all problems.

    Args:
        parser: Parser of the command.
        argv: Arguments of the command.
        first_files: TOML files from other arguments; those of --config override them.

    Raises:
        UsageError: Arguments that cannot be read, or a file that does not exist.
        ConfigError: A file is not TOML.
    """
    command = parser.command if isinstance(parser, Parser) else "train"
    arguments, twice = with_our_flags(normalise(argv), parser, command)
    parsed, unknown = parser.parse_known_args(arguments)
    known = available_options(command)
    flags = {n: value for n, value in without_switches(vars(parsed)).items() if n in known}
    files = [*first_files(parsed), *map(Path, parsed.config)]
    config, problems = merge_options(files, flags, command)
    return config, parsed, twice + unknown_flags(unknown, command) + problems


def merge_options(
    files: Sequence[Path], flags: Mapping[str, object], command: str = "train"
) -> tuple[TrainConfig, list[str]]:
    """Return the options of TOML files, left to right, then the flags, with all problems.

    Raises:
        UsageError: A file does not exist.
        ConfigError: A file is not TOML.
    """
    known = available_options(command)
    options, hints = options_of(TrainConfig), type_hints(TrainConfig)
    problems: list[str] = []
    values: dict[str, object] = {}
    for path in files:
        if not path.is_file():
            raise UsageError(f"--config: no such file: {path}")
        ours, twice = with_our_names(read_toml(path), known, command)
        problems += [f"{path}: {problem}" for problem in twice]
        for name, value in ours.items():
            if name in known:
                values[name] = coerce(value, hints[name])
            elif name not in options and isinstance(value, Mapping):
                problems.append(f"{path}: unknown option {name!r}{TABLE_HINT}")
            elif name not in options or coerce(value, hints[name]) != options[name][0].default:
                # The config.toml of a run has every option of the record.
                problems.append(f"{path}: {unknown_name(name, command)}")
    texts = {name: from_text(value, hints[name]) for name, value in flags.items()}
    config = TrainConfig()
    for name, value in {**values, **texts}.items():
        setattr(config, name, value)
    config.explicit = frozenset(values | texts)
    is_of_run = is_training(command) or command in ("plan", "config show")
    if is_of_run and "fsdp" not in values | texts:
        config = config.with_installed_backend()
    problems += config.problems()
    return config, problems


def unknown_name(name: str, command: str = "train") -> str:
    """Return the sentence about an option that a command lacks: why, or the nearest names."""
    if name in UNAVAILABLE and name not in NAMES_OF_COMMANDS.get(command, ()):
        return f"{name} is not available: {UNAVAILABLE[name]}"
    if name not in options_of(TrainConfig):
        return f"unknown option {name!r}{option_hint(name, available_options(command), command)}"
    return refusal(name, command)


def unknown_flags(arguments: Sequence[str], command: str = "train") -> list[str]:
    """Return sentences about unknown arguments; values after an unknown flag belong to it."""
    flags = [argument for argument in arguments if argument.startswith("--")]
    if not flags:
        # Hydra's form has no dashes.
        named = [argument.split("=")[0] for argument in arguments if "=" in argument]
        bare = [repr(argument) for argument in arguments if "=" not in argument]
        usage = (
            f"unexpected {', '.join(bare)}: an option is --NAME VALUE, a switch --NAME or "
            f"--no_NAME; see lightrft {command} --help"
        )
        return [unknown_name(name, command) for name in named] + ([usage] if bare else [])
    return [unknown_name(flag.removeprefix("--").split("=")[0], command) for flag in flags]


def with_our_flags(
    arguments: Sequence[str], parser: argparse.ArgumentParser, command: str
) -> tuple[list[str], list[str]]:
    """Return arguments by our flags, and a line for each flag that is set by both names.

    Flags of other libraries that mean the same are accepted; one printed line says so.
    """
    ours, problems, taken = list[str](), list[str](), list[str]()
    flags = parser._option_string_actions
    typed = {argument.partition("=")[0] for argument in arguments}
    awaits_value = False
    for argument in arguments:
        flag, sign, value = argument.partition("=")
        name = flag.removeprefix("--").removeprefix("no_")
        same = same_option(name, command) if flag.startswith("--") and flag not in flags else None
        option, entry = same or ("", "")
        target = flag.replace(name, option)
        if same is None or target not in flags:
            is_value = awaits_value and not flag.startswith("--")
            ours[-1:] = [ours[-1] + argument] if is_value else [*ours[-1:], argument]
            awaits_value = False
            continue
        awaits_value = bool(entry) and not sign
        taken.append(taken_as(name, option, entry))
        if not entry and target in typed:
            problems.append(f"--{name} and {target} are one option: give one of them")
        typed.add(target)
        ours += [target, f"{entry}={value}"] if entry else [target + sign + value]
    if taken:
        said_once(f"names of other libraries: {', '.join(taken)}")
    return ours, problems


def normalise(arguments: Sequence[str]) -> list[str]:
    """Spell --some-flag=x as --some_flag=x, so that both forms work."""
    return [
        "--" + "=".join([name.replace("-", "_"), *value]) if argument.startswith("--") else argument
        for argument in arguments
        for name, *value in [argument.removeprefix("--").split("=", 1)]
    ]
