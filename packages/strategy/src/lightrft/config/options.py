"""Options: dataclass fields that carry their help, legal values and uses. Standard library only."""

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field
from functools import partial
from pathlib import PurePath
from types import MappingProxyType
from typing import (
    Any,
    Literal,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    dataclass_transform,
)

T = TypeVar("T")
Arguments = Mapping[str, str | int | float | bool] | None
# A check of values together: one or several sentences on what is wrong; falsy if nothing is. Parts
# cannot name the record that joins them; a test knows that rules name options alone.
Rule = Callable[[Any], object]
CRITIC = "a critic"
_SECRET = re.compile(r"(key|token|secret|password|passwd|credentials?)$|wandb")
_COLUMN = re.compile(r"(input|label|images?|videos?|reference)_key$")
_ADDRESS = re.compile(r"\w*:?//[^\s'\"<>]*[@?][^\s'\"<>]*")
_QUERY_VALUE = re.compile(r"((?:[^=&#]*=)?)([^&#]+)")
MASK = "***"
_SCALARS = (str, int, float)
LARGEST_INT = 2**63 - 1


class ConfigError(ValueError):
    """One or more configuration values are wrong; the message lists all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """Description of an option beside its name, type and default.

    Args:
        help: One sentence.
        group: Heading under which the option is listed.
        choices: All legal values (a registry takes `FILE.py:NAME`, too), or None.
        at_least, at_most: Inclusive bounds of a number.
        above: Exclusive lower bound of a number.
        finite: Whether inf is refused; nan always is.
        acts_with: When the option acts: "NAME" if that option is set, "not NAME" if it is not,
            "NAME VALUE" if it has this value, "A or B" if one of them holds, `CRITIC` if the
            advantage estimator has one; None is always.
        acts_when: Check whether the option acts, if `acts_with` is only its text.
        may_change: Whether a continued run stays exact if this changes.
        by_machine: Whether the machine decides a value of None: at the start, saved with the run
            and kept when the run continues.
        secret: Whether the value is hidden and never saved.
        common: Whether `train --help` lists it.
        path: Kind of path that the value is, or None.
    """

    help: str
    group: str
    choices: Collection[object] | None = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    finite: bool = True
    acts_with: str | None = None
    acts_when: Rule | None = None
    may_change: bool = False
    by_machine: bool = False
    secret: bool = False
    common: bool = False
    path: Literal["file", "folder"] | None = None


class _Details(TypedDict, total=False):
    """Optional arguments of `OptionInfo`; an option's part sets the group and the others."""

    group: str
    choices: Collection[object] | None
    at_least: float | None
    at_most: float | None
    above: float | None
    finite: bool
    acts_with: str | None
    acts_when: Rule | None
    may_change: bool
    by_machine: bool
    secret: bool
    common: bool
    path: Literal["file", "folder"] | None


def option(default: T, help: str, **details: Unpack[_Details]) -> T:
    """Return a dataclass field with a default; give a group unless `part` decorates its class."""
    info = OptionInfo(help=help, **details) if "group" in details else {"help": help, **details}
    made: T = field(default=default, metadata={"option": info})
    return made


@dataclass_transform(kw_only_default=True)
def part(group: str, /, **usual: Unpack[_Details]) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a dataclass of options, to be joined with those of other parts.

    Its attribute `rules`, made by `checks`, holds the conditions between its options and others.

    Args:
        group: Heading under which its options are listed.
        **usual: Details that all its options share, unless an option has another heading or
            says otherwise.
    """

    def decorate(cls: type[T]) -> type[T]:
        for entry in vars(cls).values():
            info = entry.metadata.get("option") if isinstance(entry, Field) else None
            if isinstance(info, dict):
                info = OptionInfo(**{"group": group, **usual, **info})
                entry.metadata = MappingProxyType({"option": info})
        return dataclass(kw_only=True)(cls)

    return decorate


def checks(*rules: Rule) -> tuple[Rule, ...]:
    """Return the rules of a part, for its attribute `rules`."""
    return rules


def rules_of(cls: type[object]) -> list[Rule]:
    """Return the rules of all parts that a record joins."""
    return [rule for each in reversed(cls.__mro__) for rule in vars(each).get("rules", ())]


def nonzero(name: str) -> Rule:
    """Return the rule that a number, where -1 means off, is not 0."""
    return lambda c: (
        getattr(c, name) == 0 and f"{name}: got 0, expected -1 (off) or a number of at least 1"
    )


def holding(c: object, condition: str) -> str:
    """Return the first part of "A or not B or C VALUE" that is true of options, or ""."""
    return next((each for each in condition.split(" or ") if _holds(c, each)), "")


def _holds(c: object, text: str) -> bool:
    name, _, value = text.removeprefix("not ").partition(" ")
    actual = getattr(c, name)
    is_set = str(actual) == value if value else bool(actual)
    return is_set != text.startswith("not ")


def excludes(switch: str, reasons: Mapping[str, str]) -> Iterator[Rule]:
    """Yield rules that forbid an option beside others, by their conditions."""
    for condition, reason in reasons.items():
        yield partial(_exclusion, switch, condition, reason)


def _exclusion(switch: str, condition: str, reason: str, c: object) -> str:
    one = holding(c, switch)
    other = one and holding(c, condition)
    return other and f"{one} excludes {other}: {reason}; leave one of them out"


def options_of(cls: type[object]) -> dict[str, tuple[Field[object], OptionInfo]]:
    """Return the options of a dataclass by name, in order of declaration."""
    entries: Mapping[str, Field[object]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return {
        name: (entry, entry.metadata["option"])
        for name, entry in entries.items()
        if "option" in entry.metadata
    }


_HINTS: dict[type[object], dict[str, object]] = {}


def type_hints(cls: type[object], **checked_only: type[object]) -> dict[str, object]:
    """Return the resolved annotation of every field of a dataclass.

    Args:
        cls: The dataclass.
        checked_only: Classes by the names that its module imports for type checkers alone.
    """
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls, localns=checked_only)
    return _HINTS[cls]


def alternatives(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether the value is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def accepts(value: object, hint: object) -> bool:
    """Return whether a value has the annotated type; ints are floats, bools are not ints."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(value, part) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(accepts(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(accepts, value, arguments))
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    target = origin or hint
    return isinstance(value, target) if isinstance(target, type) else True


def type_name(hint: object) -> str:
    """Return the annotation as a message shows it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def coerce(value: object, hint: object) -> object:
    """Convert lists, single strings, paths, ints and 2.0, as callers give them, to the hint."""
    kinds = alternatives(hint)
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, list) and not accepts(value, hint):
        # Numbers within are floats, too.
        return tuple(coerce(item, item_hint(kinds)) for item in value)
    if isinstance(value, str) and str not in kinds and item_hint(kinds) is str:
        return (value,)
    if float in kinds and int not in kinds and is_number(value):
        with suppress(OverflowError):  # a whole number beyond floats; the bounds refuse it
            return float(value)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    return value


def item_hint(kinds: tuple[object, ...]) -> object:
    """Return the annotation of a tuple's items among these kinds; `object` without one."""
    tuples = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    return typing.get_args(tuples[0])[0] if tuples else object


def check_value(name: str, value: object, hint: object, info: OptionInfo) -> str | None:
    """Return one line on what is wrong with a value's type, choice, text or range, or None."""
    if not accepts(value, hint):
        kind = f"{name}: got {short(value)} ({type(value).__name__}), expected {type_name(hint)}"
        return kind + _type_remedy(value, hint)
    problem = _choice_problem(name, value, info)
    text_problem = _text_problem(value, info)
    if problem is None and text_problem is not None:
        problem = f"{name}: got {short(value)}, expected {text_problem}"
    return problem or _number_problem(name, value, info)


def _type_remedy(value: object, hint: object) -> str:
    """Return a hint for a script that passed rows, a function, or one text instead of several."""
    is_rows = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    if callable(value) or is_rows:
        return (
            "; lightrft.trainer.train(MODEL, ROWS, FUNCTION) takes rows and functions, as sft, "
            "prefer, reward and distill beside it do"
        )
    kinds = alternatives(hint)
    if isinstance(value, str) and Mapping in map(typing.get_origin, kinds):
        return ": write NAME=VALUE, or a JSON object"
    is_one = isinstance(value, str) and item_hint(kinds) is str
    return f", such as ({value!r},)" if is_one else ""


def _choice_problem(name: str, value: object, info: OptionInfo) -> str | None:
    items = value if isinstance(value, tuple) else () if value is None else (value,)
    wrong = [item for item in items if info.choices is not None and item not in info.choices]
    if not wrong:
        return None
    listing = list(info.choices or ())
    near = difflib.get_close_matches(str(wrong[0]), map(str, listing), n=1)
    hint_text = f" (did you mean {near[0]!r}?)" if near else ""
    hint_text = word_of_the_field(str(wrong[0])) or hint_text
    references = "" if isinstance(info.choices, tuple) else ", FILE.py:NAME or MODULE:NAME"
    hint_text += comma_hint(wrong[0])
    return f"{name}: got {short(wrong[0])}, expected one of {listing}{references}{hint_text}"


def comma_hint(value: object) -> str:
    """Return the end of an error about a value that may be several, joined by commas, or ""."""
    is_joined = isinstance(value, str) and "," in value
    return "; several values are separated by spaces, not by commas" if is_joined else ""


def _number_problem(name: str, value: object, info: OptionInfo) -> str | None:
    items: Iterable[tuple[str, object]] = ((name, value),)
    if isinstance(value, tuple):
        items = ((name, item) for item in value)
    elif isinstance(value, Mapping):
        items = ((f"{name}: {key}", item) for key, item in value.items())
    for place, number in items:
        if is_number(number):
            problem = _range_problem(number, info)
            if problem is not None:
                shown_value = number if isinstance(value, Mapping) else value
                return f"{place}: got {short(shown_value)}, expected {problem}"
    return None


def _text_problem(value: object, info: OptionInfo) -> str | None:
    """Return the fault of a text, or of several, that files and the system would refuse."""
    parts = list(_parts(value))
    if isinstance(value, Mapping) and any(part is None or part == "" for part in parts):
        return "names with texts, numbers or booleans"
    texts = [part for part in parts if isinstance(part, str)]
    if re.search("[\0\ud800-\udfff]", "".join(texts)):
        return "a text of UTF-8 characters without NUL"
    if info.path is not None and not all(map(str.strip, texts)):
        return f"the path of a {info.path}"
    return None


def _parts(value: object) -> Iterator[object]:
    """Yield a value, or the items of lists and tables, names included."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            # An empty text is a value like others, and no name.
            yield from (part for part in _parts(item) if part != "")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    else:
        yield value


def short(value: object) -> str:
    """Return the value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = f"a number of {int(value).bit_length()} bits"  # type: ignore[call-overload]
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _range_problem(number: float, info: OptionInfo) -> str | None:
    if isinstance(number, float) and (math.isnan(number) or (info.finite and math.isinf(number))):
        return "a finite number" if info.finite else "a number"
    if isinstance(number, int) and abs(number) > LARGEST_INT:
        return "a number of at most 64 bits"
    bounds = []
    if info.at_least is not None and number < info.at_least:
        bounds.append(f">= {info.at_least}")
    if info.above is not None and number <= info.above:
        bounds.append(f"> {info.above}")
    if info.at_most is not None and number > info.at_most:
        bounds.append(f"<= {info.at_most}")
    return " and ".join(bounds) or None


# Terms of the field with the command, option or choice here; registries add theirs.
ALGORITHMS: dict[str, str] = {
    "distillation": "lightrft distill",
    "dpo": "lightrft prefer",
    "gkd": "lightrft distill",
    "grpo": "lightrft train as it is: advantage_estimator group_norm with policy_loss ppo",
    "ppo": "lightrft train --advantage_estimator gae",
    "rm": "lightrft reward",
    "rlvr": "lightrft train",
}


def word_of_the_field(name: str) -> str:
    """Return a sentence's end that says what an algorithm's name means here, or ""."""
    there = ALGORITHMS.get(name.lower().replace("-", "_"), "")
    return there and f"; {name} is {there}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence: the nearest known names, or all if none is near.

    A term of the field is answered with its meaning here, never with a similar spelling.
    """
    if meaning := word_of_the_field(name):
        return meaning
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"


def mask_address(text: str) -> str:
    """Return the text with *** for user, password and query values of every address in it.

    A `${NAME}` of the environment stays, since it reveals nothing.
    """
    return _ADDRESS.sub(lambda match: _masked_address(match[0]), text)


def _masked_address(address: str) -> str:
    scheme, _, rest = address.partition("//")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    user = MASK if at and not _is_variable(user) else user
    place, mark, query = f"{scheme}//{user}{at}{host}{slash}{path}".partition("?")
    return (
        place
        + mark
        + _QUERY_VALUE.sub(
            lambda match: match[0] if _is_variable(match[2]) else match[1] + MASK, query
        )
    )


def _is_variable(text: str) -> bool:
    return bool(re.fullmatch(r"(\$\{\w+\}:?)+", text))


def looks_secret(name: str) -> bool:
    """Return whether a name that no option describes sounds like that of a secret."""
    return bool(_SECRET.search(name.lower())) and not _COLUMN.search(name.lower())


def masked(value: object) -> object:
    """Return the value without credentials in addresses and without entries of secret names."""
    if isinstance(value, str):
        return mask_address(value)
    if isinstance(value, tuple | list):
        return type(value)(masked(item) for item in value)
    if isinstance(value, Mapping):
        return {key: masked(item) for key, item in value.items() if not looks_secret(str(key))}
    return value


def shown(value: object, *, secret: bool) -> str:
    """Return the value as text; secrets and passwords in addresses are hidden."""
    if isinstance(value, str):
        return MASK if secret and value else mask_address(repr(value))
    if isinstance(value, Mapping):
        items = ", ".join(
            f"{k}: {shown(v, secret=secret or looks_secret(str(k)))}" for k, v in value.items()
        )
        return "{" + items + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(item, secret=secret) for item in value) + "]"
    return repr(value)


Form = Literal["switch", "value", "value or switch", "values", "pairs"]


@dataclass(frozen=True, slots=True)
class FlagShape:
    """The form of the flag of one option.

    Args:
        form: `switch` takes no value, `values` takes several, `pairs` takes KEY=VALUE items.
        item: Type of one value: the first of str, int and float that the field accepts.
        count: Number of values as argparse writes it; None except for `values`.
        opposites: Flags that set the opposite of a switch.
    """

    form: Form
    item: type[str] | type[int] | type[float] = str
    count: int | Literal["+"] | None = None
    opposites: tuple[str, ...] = ()


def flag_shape(name: str, hint: object) -> FlagShape:
    """Return the form of the flag of a field; enable_x also has disable_x."""
    kinds = alternatives(hint)
    origins = [typing.get_origin(kind) for kind in kinds]
    if not {Mapping, dict}.isdisjoint(origins):
        return FlagShape("pairs")
    scalar = next((kind for kind in _SCALARS if kind in kinds), None)
    if scalar is None and bool in kinds:
        stem, _, rest = name.partition("_")
        disable = (f"--disable_{rest}",) if stem == "enable" else ()
        return FlagShape("switch", opposites=(f"--no_{name}", *disable))
    if tuple in origins:
        items = typing.get_args(kinds[origins.index(tuple)])
        item = next(kind for kind in _SCALARS if kind in alternatives(items[0]))
        return FlagShape("values", item, "+" if Ellipsis in items else len(items))
    return FlagShape("value or switch" if bool in kinds else "value", scalar or str)
