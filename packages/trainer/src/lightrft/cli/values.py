"""Text of flags and values of TOML files as the types that a configuration declares."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import TypeGuard

from lightrft.utils.flags import alternatives


def convert(value: object, hint: object) -> object:
    """A value as the annotated type; one that does not fit stays as it is.

    The configuration itself reports values of the wrong type, all at once.
    """
    kinds = alternatives(hint)
    if isinstance(value, str):
        return _from_text(value, kinds)
    if isinstance(value, list):
        return _from_list(value, kinds)
    if float in kinds and int not in kinds and isinstance(value, int) and value is not True:
        return float(value)
    return value


def _from_text(text: str, kinds: tuple[object, ...]) -> object:
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            return _number(text, kind)
    return text


def _from_list(items: list[object], kinds: tuple[object, ...]) -> object:
    origins = [typing.get_origin(kind) for kind in kinds]
    if Mapping in origins and all(isinstance(item, str) for item in items):
        return pairs([str(item) for item in items])
    if tuple not in origins:
        return items
    item_hint = typing.get_args(kinds[origins.index(tuple)])[0]
    if item_hint in (int, float):  # numbers may be separated by commas as well
        items = [part for item in items for part in (item.split(",") if _is_text(item) else [item])]
    return tuple(convert(item, item_hint) for item in items)


def _is_text(item: object) -> TypeGuard[str]:
    return isinstance(item, str)


def _number(text: str, kind: type[int] | type[float]) -> object:
    try:
        number = float(text)
    except ValueError:
        return text
    if kind is float:
        return number
    return int(number) if number.is_integer() else text


def pairs(items: list[str]) -> dict[str, str | int | float | bool] | str:
    """KEY=VALUE items as a mapping; numbers, true and false are recognised.

    Text without an equals sign comes back as it is, for the configuration to report.
    """
    made: dict[str, str | int | float | bool] = {}
    for item in items:
        name, sign, text = item.partition("=")
        if not sign:
            return item
        made[name] = _scalar(text)
    return made


def _scalar(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
