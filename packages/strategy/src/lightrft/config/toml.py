"""Reading and writing of flat TOML files."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from lightrft.config.files import make_folder, named_errors, read_bytes, require_flat, require_held
from lightrft.config.options import ConfigError, masked, options_of

MAX_TOML_BYTES = 2**22
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def read_toml(path: Path) -> dict[str, object]:
    """Return keys and values of a TOML file.

    Raises:
        FileError: It cannot be read.
        ConfigError: It is not TOML; the message names file, line and column.
    """
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{path}: YAML is not read: write the options as TOML, a line name = value each, as "
            "lightrft config show prints them"
        )
    content = read_bytes(path, max_bytes=MAX_TOML_BYTES)
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as err:  # no TOML, no UTF-8, or numbers without end
        raise ConfigError(f"{path}: not a TOML file: {err}") from err
    require_flat(values, path)
    return values


def write_toml(config: object, path: Path, left_out: set[str]) -> None:
    """Write the options of `config` in groups, without secrets and those that are None.

    The file appears whole or not at all. Only its owner may read it, in case a value that nobody
    marked is a secret.

    Args:
        config: The options.
        path: The file.
        left_out: Names of further options that are not written.
    """
    groups: dict[str, list[str]] = {}
    options = options_of(type(config))
    for name, value in without_secrets(config).items():
        if value is not None and name not in left_out:
            groups.setdefault(options[name][1].group, []).append(f"{name} = {format_toml(value)}")
    text = "\n\n".join("\n".join([f"# {group}", *lines]) for group, lines in groups.items())
    make_folder(path.parent)
    write_whole(path, text + "\n", mode=0o600)


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file that appears whole or not at all.

    Args:
        path: The file.
        text: Whole content.
        mode: Permissions, before the mask of the process.
    """
    require_held()
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with named_errors(path), os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    partial.replace(path)


def without_secrets(config: object) -> dict[str, object]:
    """Return the options by name, without secret ones; credentials in addresses are masked."""
    return {
        name: masked(vars(config)[name])
        for name, (_, info) in options_of(type(config)).items()
        if not info.secret
    }


def format_toml(value: object) -> str:
    """Return the TOML literal of a string, number, boolean, sequence or mapping.

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


def _quote(text: str) -> str:
    escaped = "".join(
        _ESCAPES.get(char, char if char.isprintable() else f"\\U{ord(char):08x}") for char in text
    )
    return f'"{escaped}"'
