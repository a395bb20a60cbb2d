"""What a field of a configuration looks like on a command line."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["switch", "value", "value or switch", "values", "pairs"]
_SCALARS = (str, int, float)


@dataclass(frozen=True, slots=True)
class FlagShape:
    """The form of one flag.

    Args:
        form: `switch` takes no value, `values` takes several, `pairs` takes KEY=VALUE items.
        item: Type of one value: the first of str, int and float that the field accepts.
        count: Number of values as argparse writes it; None except for `values`.
        opposites: Flags that set the opposite of a switch.
    """

    form: Form
    item: type[str] | type[int] | type[float] = str
    count: int | Literal["+"] | None = None
    opposites: tuple[str, ...] = ()


def alternatives(hint: object) -> tuple[object, ...]:
    """The members of a union, or the annotation alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def shape_of(name: str, hint: object) -> FlagShape:
    """The form of the flag of a field with this annotation."""
    kinds = alternatives(hint)
    origins = [typing.get_origin(kind) for kind in kinds]
    if not {Mapping, dict}.isdisjoint(origins):
        return FlagShape("pairs")
    scalar = next((kind for kind in _SCALARS if kind in kinds), None)
    if scalar is None and bool in kinds:
        return FlagShape("switch", opposites=_opposites(name))
    if tuple in origins:
        items = typing.get_args(kinds[origins.index(tuple)])
        item = next(kind for kind in _SCALARS if kind in alternatives(items[0]))
        return FlagShape("values", item, "+" if Ellipsis in items else len(items))
    return FlagShape("value or switch" if bool in kinds else "value", scalar or str)


def _opposites(name: str) -> tuple[str, ...]:
    """The negative forms of a switch: enable_x also has disable_x."""
    stem, _, rest = name.partition("_")
    return (f"--no_{name}", f"--disable_{rest}") if stem == "enable" else (f"--no_{name}",)
