"""Choice by name, with an error that lists the known names."""

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
    nearest = difflib.get_close_matches(name.lower(), list(registry), n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    known = ", ".join(sorted(registry))
    raise ValueError(f"unknown {kind} {name!r}: expected one of {known}{hint}")
