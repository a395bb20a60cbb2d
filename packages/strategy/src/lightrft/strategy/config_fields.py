"""Options that know their help and legal values, and how values are checked and shown."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, field
from typing import Literal, TypeVar

T = TypeVar("T")
SECRET_WORDS = ("key", "token", "secret", "password", "passwd", "credential", "wandb")
# Column names and labels, not secrets.
PUBLIC_NAMES = frozenset(
    {"input_key", "label_key", "images_key", "reference_key"}
    | {"first_token_temperature", "high_entropy_token_ratio", "micro_batch_tokens"}
    | {"partial_rollout_tokens"}
    | {"wandb_project", "wandb_run_name", "wandb_group", "wandb_org"}
)


class ConfigError(ValueError):
    """One or more configuration values are wrong; the message lists all of them."""


def option(
    default: T,
    text: str,
    *,
    group: str,
    choices: tuple[object, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> T:
    """A dataclass field that carries its own help, group and legal values.

    Args:
        default: Value when nothing is given.
        text: One sentence of help.
        group: Heading under which the option is listed.
        choices: All legal values, or None.
        at_least, at_most: Inclusive bounds of a number.
        above: Exclusive lower bound of a number.
    """
    metadata = {
        "help": text,
        "group": group,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
    }
    made: T = field(default=default, metadata=metadata)
    return made


_HINTS: dict[type[object], dict[str, object]] = {}


def type_hints(cls: type[object]) -> dict[str, object]:
    """The resolved annotation of every field of a dataclass."""
    if cls not in _HINTS:
        _HINTS[cls] = dict(typing.get_type_hints(cls))
    return _HINTS[cls]


def is_number(value: object) -> bool:
    """Whether the value is an int or float, but no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def accepts(value: object, hint: object) -> bool:
    """Whether a value has the annotated type; ints are floats, bools are not ints."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(value, part) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(accepts(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(accepts, value, arguments))
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    target = origin or hint
    return isinstance(value, target) if isinstance(target, type) else True


def coerce(value: object, hint: object) -> object:
    """Parsers and TOML give lists and ints where tuples and floats are meant."""
    if isinstance(value, list) and not accepts(value, hint):
        value = tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _describe_type(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def check_field(entry: Field[object], value: object, hint: object) -> list[str]:
    """What is wrong with one value: its type, or its range; at most one line."""
    if not accepts(value, hint):
        kind = type(value).__name__
        return [f"{entry.name}: got {value!r} ({kind}), expected {_describe_type(hint)}"]
    rules = entry.metadata
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
        hint_text = f" (did you mean {near[0]!r}?)" if near else ""
        return [f"{entry.name}: got {value!r}, expected one of {list(choices)}{hint_text}"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    at_least, above, at_most = (rules.get(name) for name in ("at_least", "above", "at_most"))
    bounds = []
    if at_least is not None and value < at_least:
        bounds.append(f">= {at_least}")
    if above is not None and value <= above:
        bounds.append(f"> {above}")
    if at_most is not None and value > at_most:
        bounds.append(f"<= {at_most}")
    return [f"{entry.name}: got {value!r}, expected {' and '.join(bounds)}"] if bounds else []


def default_of(entry: Field[object]) -> object:
    """The default of a field; None if it has none."""
    return None if entry.default is MISSING else entry.default


def _is_secret(name: str) -> bool:
    lowered = name.lower()
    return lowered not in PUBLIC_NAMES and any(word in lowered for word in SECRET_WORDS)


def mask_address(text: str) -> str:
    """The text with user name and password of every address replaced by ***."""
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def shown(name: str, value: object) -> str:
    """The value as text; strings under secret names and passwords in addresses are hidden."""
    if isinstance(value, str):
        if _is_secret(name) and value:
            return "***"
        return mask_address(repr(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {shown(f'{name}.{k}', v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(name, item) for item in value) + "]"
    return repr(value)
