"""Options under a backend's names: a check of the names, and values from a command line."""

import json
import re
from collections.abc import Iterable, Mapping

from lightrft.kernels.names import nearest_names

MAX_LISTED = 8
_PLAIN_TYPES: Mapping[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "None": type(None),
    "NoneType": type(None),
}


def check_options(
    options: Mapping[str, object],
    known: Iterable[str],
    *,
    reserved: Mapping[str, str] | None = None,
    engine_name: str,
) -> None:
    """Refuse names that a backend does not know or that are set elsewhere.

    Args:
        options: Options from the user.
        known: Names that the backend knows.
        reserved: Backend's name -> where it is set instead.
        engine_name: Name of the engine, for messages.

    Raises:
        ValueError: Some options are unusable; the message lists all, with the nearest known name.
    """
    names = sorted(known)
    problems = []
    for name in options:
        if reserved and name in reserved:
            problems.append(f"{name} (set by {reserved[name]})")
        elif name not in names:
            hint = nearest_names(name, names) or " (no option has a similar name)"
            problems.append(f"{name}{hint}")
    if problems:
        listed = f"; known: {', '.join(names)}" if len(names) <= MAX_LISTED else ""
        raise ValueError(
            f"unusable options of the {engine_name} engine: {', '.join(problems)}{listed}"
        )


def parse_options(
    options: Mapping[str, str | int | float | bool], hints: Mapping[str, object]
) -> dict[str, object]:
    """Convert strings from a command line to the types that the backend declares.

    Args:
        options: Options that passed `check_options`.
        hints: Backend's name -> declared type.

    Raises:
        ValueError: A string is no value of the declared type.
    """
    return {
        name: _parse(name, value, hints[name]) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _parse(name: str, text: str, hint: object) -> object:
    kinds = _kinds(hint)
    if text.lower() in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if text[:1] in ("{", "["):
        try:
            value: object = json.loads(text)
        except json.JSONDecodeError as err:
            raise ValueError(f"engine option {name}: {text!r} is not valid JSON ({err})") from err
        return value
    if kinds <= {bool, int, float, type(None)}:
        expected = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"engine option {name}: got {text!r}, expected a value of type {expected}")
    return text


def _kinds(hint: object) -> set[type]:
    """Return the plain types that a declaration names; `str` stands for everything else.

    Declarations are read as text, since some are strings that cannot be evaluated.
    """
    words = set(re.findall(r"\w+", str(hint))) - {"class", "typing", "Optional", "Union"}
    return {_PLAIN_TYPES.get(word, str) for word in words}
