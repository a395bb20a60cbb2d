"""Command-line flags made from the fields of a configuration."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import TYPE_CHECKING

from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.config_fields import type_hints
from lightrft.utils.flags import shape_of

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Collection

    from lightrft.utils.flags import FlagShape

# The flags that a parser of a training program gets unless it asks for more or fewer.
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


def add_arguments(
    parser: ArgumentParser,
    *,
    config_type: type[StrategyConfig] = StrategyConfig,
    names: Collection[str] | None = LIBRARY_FLAGS,
) -> ArgumentParser:
    """Adds flags with the defaults of a configuration; the parser's own flags are left alone.

    A Boolean gets `--name` and, unless its default is False, `--no_name`; sleeping of the engine
    has the pair `--enable_engine_sleep`, `--disable_engine_sleep`.

    Args:
        parser: Gets one group of flags per group of options.
        config_type: Where names, types, defaults and help come from.
        names: Fields to add; None adds all that a flag can express.

    Returns:
        The parser.

    Raises:
        ValueError: A name is not a field of the configuration.
    """
    entries = {entry.name: entry for entry in fields(config_type)}
    unknown = sorted(set(names or ()) - set(entries))
    if unknown:
        raise ValueError(f"{config_type.__name__} has no fields {unknown}")
    groups = {}
    for name, entry in entries.items():
        is_wanted = names is None or name in names
        if not is_wanted or _has_flag(parser, name):
            continue
        shape = shape_of(name, type_hints(config_type)[name])
        if shape.form == "pairs":  # no type of argparse makes a mapping
            continue
        title = str(entry.metadata.get("group", "other"))
        if title not in groups:
            groups[title] = parser.add_argument_group(f"{title} options")
        _add_flag(groups[title].add_argument, entry, shape)
    return parser


def _has_flag(parser: ArgumentParser, name: str) -> bool:
    known = parser._option_string_actions
    return f"--{name}" in known or any(action.dest == name for action in parser._actions)


def _add_flag(add: Callable[..., object], entry: Field[object], shape: FlagShape) -> None:
    default = entry.default
    text = f"{entry.metadata.get('help', '')} (default: {default})".replace("%", "%%")
    if shape.form == "switch":
        _add_switch(add, entry.name, default, text, opposite=shape.opposites[-1])
        return
    choices = entry.metadata.get("choices")
    shared: dict[str, object] = {"dest": entry.name, "default": default, "help": text}
    if choices is not None:
        shared["choices"] = [choice for choice in choices if choice is not None]
    if shape.form == "values":
        # An empty list is a value, too.
        shared["nargs"] = "*" if shape.count == "+" else shape.count
    elif shape.form == "value or switch":
        shared |= {"nargs": "?", "const": True}
    add(f"--{entry.name}", type=shape.item, **shared)


def _add_switch(
    add: Callable[..., object], name: str, default: object, text: str, *, opposite: str
) -> None:
    add(f"--{name}", dest=name, action="store_true", default=default, help=text)
    if default is not False:
        add(
            opposite,
            dest=name,
            action="store_false",
            default=default,
            help=f"Opposite of --{name}.",
        )
