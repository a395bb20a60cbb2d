"""Suggestions for names that are not known."""

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str], *, count: int = 1) -> str:
    """The hint " (did you mean x?)" with the known names most like this one; empty without any."""
    near = difflib.get_close_matches(name, list(known), n=count)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
