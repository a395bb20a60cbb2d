"""Text of foreign origin, made fit for a terminal. Standard library only."""

import re
import unicodedata

_PLAIN = re.compile(r"[^\n\t\x20-\x7e]")
# Joiners inside words and emoji; they move no cursor and turn no direction.
_JOINERS = "\u200c\u200d"


def printable(text: str, *, limit: int | None = None) -> str:
    r"""Return the text with every character that a terminal would obey spelled out, as `\x1b`.

    Line feeds and tabs stay. Control and format characters (escape sequences, carriage returns,
    changes of direction), surrogates and unassigned characters are replaced by their escapes.

    Args:
        text: Text of a model, a data file, another machine or a reward function.
        limit: Characters to keep; a longer text ends with its number of further characters.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]} ... ({len(text) - limit} more characters)"
    return _PLAIN.sub(_spelled, text)


def one_line(text: str, *, limit: int = 200) -> str:
    """Return the printable text on one line: white space of any kind is one space."""
    return printable(" ".join(text[: 4 * limit].split()), limit=limit)


def _spelled(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else (f"\\U{code:08x}")
    )
