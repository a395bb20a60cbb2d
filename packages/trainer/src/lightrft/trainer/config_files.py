"""Reading and writing of flat TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from lightrft.strategy.config import PUBLIC_NAMES, SECRET_WORDS, ConfigError, mask_address
from lightrft.trainer.runs.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from lightrft.strategy.config import StrategyConfig


def read_toml(path: Path) -> dict[str, object]:
    """Keys and values of a TOML file.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It is not TOML; the message names file, line and column.
    """
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"{path}: not a TOML file: {err}") from err


def write_toml(config: StrategyConfig, path: Path, *, leave_out: Collection[str]) -> None:
    """Write the options of `config` in groups; None, secrets and `leave_out` are left out.

    The file appears whole or not at all.
    """
    groups: dict[str, list[str]] = {}
    values = without_secrets(config)
    for field in fields(config):
        value = values.get(field.name)
        group = field.metadata.get("group")
        if group is None or value is None or field.name in leave_out:
            continue
        groups.setdefault(group, []).append(f"{field.name} = {format_toml(value)}")
    text = "\n\n".join("\n".join([f"# {group}", *lines]) for group, lines in groups.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text + "\n")


def format_toml(value: object) -> str:
    """The TOML literal of a string, number, boolean, sequence or mapping.

    Raises:
        TypeError: TOML has no such type.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are spelled alike in TOML
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_toml, value)) + "]"
    if isinstance(value, Mapping):
        pairs = ", ".join(
            f"{_quote(str(key))} = {format_toml(item)}" for key, item in value.items()
        )
        return "{" + pairs + "}"
    raise TypeError(f"no TOML literal for {value!r} of type {type(value).__name__}")


def without_secrets(config: StrategyConfig) -> dict[str, object]:
    """The options by name, without those of secret names; credentials in addresses are masked."""
    return {
        field.name: _masked(config.__dict__[field.name])
        for field in fields(config)
        if not is_secret(field.name)
    }


def _masked(value: object) -> object:
    if isinstance(value, str):
        return mask_address(value)
    if isinstance(value, tuple | list):
        return type(value)(_masked(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _masked(item) for key, item in value.items() if not is_secret(str(key))}
    return value


def is_secret(name: str) -> bool:
    """Whether the value of an option of this name must not be written anywhere."""
    return name not in PUBLIC_NAMES and any(word in name for word in SECRET_WORDS)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _quote(text: str) -> str:
    escaped = "".join(
        _ESCAPES.get(char, char if char.isprintable() else f"\\u{ord(char):04x}") for char in text
    )
    return f'"{escaped}"'
