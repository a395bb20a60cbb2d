"""Choice by name, with an error that lists the known names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def lookup(registry: Mapping[str, Entry], name: str, *, kind: str) -> Entry:
    """The entry called `name`.

    Raises:
        ValueError: no such name; the message lists all names and the nearest one.
    """
    if name in registry:
        return registry[name]
    raise ValueError(f"unknown {kind} {name!r}: expected one of {_listing(registry, name)}")


def _listing(names: Mapping[str, object], name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return ", ".join(sorted(names)) + hint
