"""Check of a call's arguments against the schema of its tool."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

from lightrft.config.files import require_flat
from lightrft.rollout.environments.call_formats import Arguments, MalformedCallError, ToolCall

Schema = Mapping[str, object]
# Limit of nested lists and objects in arguments: checkpoints nest them further.
_MAX_DEPTH = 100
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}


def check_call(call: ToolCall, schemas: Mapping[str, Schema]) -> Arguments:
    """Return the arguments; cast text where the schema asks for another type.

    It checks type, nullable, enum, const, anyOf, oneOf, allOf, properties, required,
    additionalProperties, items, and the bounds of numbers, texts and lists, at every level.

    Raises:
        MalformedCallError: The tool or an argument is unknown, missing or invalid.
    """
    schema = schemas.get(call.name)
    if schema is None:
        raise MalformedCallError(f"no tool {call.name!r}: there are {', '.join(schemas) or 'none'}")
    parameters = cast("Schema", schema.get("parameters") or {})
    known = cast("Mapping[str, Schema]", parameters.get("properties") or {})
    required = cast("Sequence[str]", parameters.get("required") or ())
    unknown = [name for name in call.arguments if name not in known]
    missing = [name for name in required if name not in call.arguments]
    if unknown or missing:
        raise MalformedCallError(
            f"{call.name}: "
            + "; ".join(
                f"{what} {', '.join(map(repr, names))}"
                for what, names in (("unknown argument", unknown), ("missing argument", missing))
                if names
            )
        )
    arguments = {}
    for name, value in call.arguments.items():
        try:
            arguments[name] = checked(value, known[name])
        except ValueError as error:
            raise MalformedCallError(f"{call.name}: argument {name!r} {error}") from error
        except RecursionError:
            raise MalformedCallError(f"{call.name}: argument {name!r} is too deep") from None
    try:
        # They go to another process and into files.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        require_flat(arguments, call.name, max_depth=_MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedCallError(f"{call.name}: the arguments are no JSON: {error}") from error
    return arguments


def checked(value: object, schema: Schema) -> object:
    """Return a value, cast to what the schema asks for.

    Raises:
        ValueError: It does not match the schema; the message lacks its subject, the value's name.
    """
    if schema.get("nullable") and value is None:
        return value
    value = _of_type(value, schema)
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and value not in options:
        raise ValueError(f"must be one of {json.dumps(options)}: got {str(value)[:80]!r}")
    for every in cast("Sequence[Schema]", schema.get("allOf") or ()):
        value = checked(value, every)
    value = _any_of(value, cast("Sequence[Schema]", schema.get("anyOf") or schema.get("oneOf")))
    _check_bounds(value, schema)
    if isinstance(value, dict):
        return _members(value, schema)
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, Mapping):
        return [_inside(f"[{index}]", each, items) for index, each in enumerate(value)]
    return value


def _of_type(value: object, schema: Schema) -> object:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(cast("Sequence[str]", wanted or ()))
    if not names:
        return value
    if isinstance(value, str) and "string" not in names:
        text = value.strip()
        with contextlib.suppress(ValueError, RecursionError):
            value = _WORDS[text] if text in _WORDS else json.loads(text)
    if isinstance(value, float) and value.is_integer() and "number" not in names:
        value = int(value)
    for known in names:
        is_bool = isinstance(value, bool)
        if isinstance(value, _TYPES.get(known, (object,))) and is_bool <= (known == "boolean"):
            return value
    raise ValueError(f"must be {' or '.join(names)}: got {str(value)[:80]!r}")


def _any_of(value: object, options: Sequence[Schema] | None) -> object:
    reasons = []
    for option in options or ():
        try:
            return checked(value, option)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise ValueError(" or ".join(dict.fromkeys(reasons)))
    return value


def _members(value: dict[str, object], schema: Schema) -> dict[str, object]:
    known = cast("Mapping[str, Schema]", schema.get("properties") or {})
    missing = [n for n in cast("Sequence[str]", schema.get("required") or ()) if n not in value]
    if missing:
        raise ValueError(f"needs {', '.join(map(repr, missing))}")
    further = schema.get("additionalProperties", True)
    unknown = [name for name in value if name not in known]
    if unknown and further is False:
        raise ValueError(f"must not have {', '.join(map(repr, unknown))}")
    others = further if isinstance(further, Mapping) else {}
    return {
        name: _inside(f".{name}", each, known.get(name, others)) for name, each in value.items()
    }


def _inside(place: str, value: object, schema: Schema) -> object:
    try:
        return checked(value, schema)
    except ValueError as error:
        raise ValueError(f"at {place}: {error}") from None


def _check_bounds(value: object, schema: Schema) -> None:
    size: float | None = None
    names = ("minimum", "maximum")
    if isinstance(value, str):
        size, names = len(value), ("minLength", "maxLength")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and re.search(pattern, value) is None:
            raise ValueError(f"must match {pattern!r}: got {value[:80]!r}")
    elif isinstance(value, list):
        size, names = len(value), ("minItems", "maxItems")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size = value
        _check_number(value, schema)
    for name, sign in zip(names, (1, -1), strict=True):
        bound = schema.get(name)
        if size is not None and isinstance(bound, int | float) and sign * size < sign * bound:
            raise ValueError(f"breaks {name} {bound}: got {str(value)[:80]}")


def _check_number(value: float, schema: Schema) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number: got {value}")
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if isinstance(bound, int | float) and sign * value <= sign * bound:
            raise ValueError(f"breaks {name} {bound}: got {value}")
