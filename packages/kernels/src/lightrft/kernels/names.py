"""Parts of messages: suggestions for unknown names, and first lines of errors."""

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return the hint " (did you mean x?)" with the most similar known name; empty without one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
