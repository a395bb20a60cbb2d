r"""Finding the final answer in a response and comparing it cheaply."""

from __future__ import annotations

import re
from fractions import Fraction

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_HASHES = re.compile(r"####\s*([^\n]+)")
_DECORATION = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$")
# Spaces that separate nothing: `1 2` and `1 1/2` keep theirs.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, braces balanced; None if there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        content = _balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def last_hashes(text: str) -> str | None:
    """What follows the last `####` on its line, the answer mark of GSM8K; None without one."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def to_number(text: str) -> Fraction | None:
    """The number a plain text such as `1,234.50`, `-3/4` or `$18` stands for; None otherwise."""
    parts = normalize(text).removesuffix("%").split("/")
    if len(parts) > 2 or not all(_is_number(part) for part in parts):
        return None
    numerator, denominator = [*(Fraction(part.replace(",", "")) for part in parts), Fraction(1)][:2]
    return numerator / denominator if denominator else None


def normalize(text: str) -> str:
    """The answer without spacing, currency signs and a final full stop."""
    for piece in _DECORATION:
        text = text.replace(piece, "")
    return _SPACE.sub("", text).removesuffix(".")


def quick_match(answer: str, gold: str) -> bool | None:
    """True or False where the answers are equal as text or both plain numbers; else None.

    An empty answer equals nothing.
    """
    if not answer.strip():
        return False
    if normalize(answer) == normalize(gold) != "":
        return True
    if answer.endswith("%") != gold.endswith("%"):
        return None
    left, right = to_number(answer), to_number(gold)
    return None if left is None or right is None else left == right


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(character.isdigit() for character in text)


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # an escaped brace is not a brace
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None
