"""Command-line flags made from the fields of a configuration, and parsing of their text."""

import argparse
import json
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field

from lightrft.config.options import (
    FlagShape,
    OptionInfo,
    alternatives,
    coerce,
    flag_shape,
    item_hint,
    options_of,
    type_hints,
)
from lightrft.config.strategy_config import StrategyConfig

# Flags that the published interface adds to a parser of a training program.
LIBRARY_FLAGS: tuple[str, ...] = (
    "engine_tp_size",
    "engine_mem_util",
    "engine_type",
    "enable_engine_sleep",
    "fsdp",
    "zero_stage",
    "fsdp_cpu_offload",
    "adam_offload",
    "sp_size",
    "packing_samples",
    "use_mp_opt",
    "fused_linear_logprob",
    "chunk_size",
    "log_dir",
    "plot_every",
    "mixed_mm_data",
    "bf16",
    "micro_train_batch_size",
    "train_batch_size",
    "micro_rollout_batch_size",
    "rm_use_engine",
    "rm_engine_cudagraph",
)
GROUPS = (
    "models",
    "data",
    "reward",
    "rollout",
    "algorithm",
    "training",
    "supervised",
    "preference",
    "distributed",
    "engine",
    "run",
    "monitoring",
)
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    config_type: type[StrategyConfig] = StrategyConfig,
    names: Collection[str] | None = LIBRARY_FLAGS,
    as_text: bool = False,
) -> argparse.ArgumentParser:
    """Add flags with the defaults of a configuration; the parser's other flags are left alone.

    A Boolean gets `--name` and `--no_name`; enable_x also gets `--disable_x`.

    Args:
        parser: Parser that gets one group of flags per group of options.
        config_type: Configuration with the names, types, defaults and help.
        names: Options to add; None adds all.
        as_text: Keep values as text and leave out flags that are not set, so that the configuration
            can name everything that is wrong at once; see `from_text`.

    Returns:
        The parser.

    Raises:
        ValueError: A name is no option of the configuration.
    """
    options, hints = options_of(config_type), type_hints(config_type)
    unknown = sorted(set(names or ()) - set(options))
    if unknown:
        raise ValueError(f"{config_type.__name__} has no fields {unknown}")
    groups = {}
    for name in sorted(options, key=lambda name: GROUPS.index(options[name][1].group)):
        entry, info = options[name]
        shape = flag_shape(name, hints[name])
        # No type of argparse makes a mapping.
        is_wanted = (names is None or name in names) and (as_text or shape.form != "pairs")
        if not is_wanted or _has_flag(parser, name):
            continue
        if info.group not in groups:
            groups[info.group] = parser.add_argument_group(f"{info.group} options")
        _add_flag(groups[info.group], entry, info, shape, as_text=as_text)
    return parser


def _has_flag(parser: argparse.ArgumentParser, name: str) -> bool:
    known = parser._option_string_actions
    return f"--{name}" in known or any(action.dest == name for action in parser._actions)


def _add_flag(
    group: argparse._ArgumentGroup,
    entry: Field[object],
    info: OptionInfo,
    shape: FlagShape,
    *,
    as_text: bool,
) -> None:
    default = argparse.SUPPRESS if as_text else entry.default
    flag, text = f"--{entry.name}", _help(entry, info)
    if shape.form == "switch":
        opposite_help = f"Opposite of {flag}." if entry.default else argparse.SUPPRESS
        for strings, value, help_text in (
            ((flag,), True, text),
            (shape.opposites, False, opposite_help),
        ):
            group.add_argument(
                *strings,
                dest=entry.name,
                action="store_const",
                const=value,
                default=default,
                help=help_text,
            )
        return
    if shape.form == "pairs":
        # One flag may have several pairs, and the flag may be repeated.
        group.add_argument(
            flag,
            flag.removesuffix("s"),
            dest=entry.name,
            action="extend",
            nargs="+",
            metavar="KEY=VALUE",
            default=default,
            help=text,
        )
        return
    counts: dict[str, object] = {}
    if shape.form == "values":
        # A program's parser accepts an empty list, too.
        counts["nargs"] = shape.count if as_text or shape.count != "+" else "*"
        if as_text and shape.count == "+":
            counts["action"] = "extend"
    elif shape.form == "value or switch":
        counts |= {"nargs": "?", "const": True}
    if not as_text:
        counts |= {"type": shape.item, "choices": info.choices}
    metavar = None if not as_text and info.choices is not None else _METAVARS[shape.item]
    group.add_argument(flag, default=default, metavar=metavar, help=text, **counts)  # type: ignore[arg-type]


def _help(entry: Field[object], info: OptionInfo) -> str:
    parts = [info.help]
    if info.choices:
        parts.append("One of " + ", ".join(str(choice).lower() for choice in info.choices) + ".")
    if entry.default not in (None, False, ()):
        default = entry.default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        parts.append(f"Default: {shown}.")
    return " ".join(parts).replace("%", "%%")


def from_text(value: object, hint: object) -> object:
    """Convert the text of a flag to the annotated type; unfit text stays as it is.

    The configuration itself reports values of the wrong type, all at once.
    """
    kinds = alternatives(hint)
    if isinstance(value, str):
        return _scalar_from_text(value, kinds)
    if isinstance(value, list):
        return _sequence_from_list(value, kinds)
    return coerce(value, hint)


def _scalar_from_text(text: str, kinds: tuple[object, ...]) -> object:
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            return _number(text, kind)
    return text


def _sequence_from_list(items: list[object], kinds: tuple[object, ...]) -> object:
    origins = [typing.get_origin(kind) for kind in kinds]
    if Mapping in origins and all(isinstance(item, str) for item in items):
        return pairs([str(item) for item in items])
    if tuple not in origins:
        return items
    hint = item_hint(kinds)
    if hint in (int, float):  # numbers may be separated by commas as well
        items = [
            part
            for item in items
            for part in (item.split(",") if isinstance(item, str) else [item])
        ]
    return tuple(from_text(item, hint) for item in items)


def _number(text: str, kind: type[int] | type[float]) -> object:
    try:
        number = float(text)
    except ValueError:
        return text
    if kind is float:
        return number
    try:
        return int(text)  # floats have not all of its digits
    except ValueError:
        return int(number) if number.is_integer() else text


def pairs(items: list[str]) -> dict[str, str | int | float | bool] | str:
    """Return KEY=VALUE items and JSON objects as a mapping; numbers, true and false are recognised.

    Text that is neither comes back as it is, for the configuration to report.
    """
    made: dict[str, str | int | float | bool] = {}
    for item in items:
        if item.lstrip().startswith("{"):
            try:
                made |= json.loads(item)
            except ValueError:
                return item
            continue
        name, sign, text = item.partition("=")
        if not sign:
            return item
        made[name] = _untyped(text)
    return made


def _untyped(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
