"""Parts of messages: suggestions for unknown names, and first lines of errors."""

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return the hint " (did you mean x?)" with the most similar known name; empty without one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class.

    A line that announces another one, by a colon at its end, has that behind it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
