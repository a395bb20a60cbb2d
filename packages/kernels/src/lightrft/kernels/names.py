"""Parts of messages: suggestions for names that are not known, and the heads of errors."""

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str]) -> str:
    """The hint " (did you mean x?)" with the known name most like this one; empty without any."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
