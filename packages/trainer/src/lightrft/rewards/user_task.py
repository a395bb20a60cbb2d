"""The part of a user's reward function that runs in a worker: loading, calling, checking."""

import asyncio
import hashlib
import importlib.util
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, cast, runtime_checkable

from lightrft.kernels.names import nearest_names
from lightrft.rewards.environment_snapshot import with_snapshots
from lightrft.rewards.other_signatures import adapted
from lightrft.rewards.types import MEDIA_COLUMNS
from lightrft.rewards.worker import ReportedError

if TYPE_CHECKING:
    from lightrft.engines.media.media import Media

MODULE_NAME = "lightrft_user_reward"

# Reward of one response, or None for the sum of its components, and the components. Without
# either, the function did not score the response.
CheckedResult = tuple[float | None, dict[str, float]]


class Parameter(TypedDict):
    """One parameter of a user's function, with its kind by name as in `inspect`."""

    name: str
    kind: str
    is_required: bool


class Description(TypedDict):
    """A user's function."""

    parameters: list[Parameter]
    whole_batch: bool


class MissingFunctionError(ReportedError):
    """The file has no function of this name."""


@runtime_checkable
class SupportsToList(Protocol):
    """Tensors and arrays."""

    def tolist(self) -> object:
        """Nested lists of Python numbers."""
        ...


class UserFunction:
    """A function of a Python file.

    Args:
        path: Path of the file.
        name: Name of the function.
        seed: Seed of the global generators, combined with the responses of a call.
    """

    def __init__(self, path: str, name: str, seed: int) -> None:
        self._function = _load(Path(path), name)
        self._seed = seed
        self._loop = AwaitLoop()

    def describe(self) -> object:
        """Return the parameters, and whether the function wants all responses in one call."""
        return describe_function(self._function)

    def __call__(self, request: object) -> object:
        """Return the results as [reward or null, components] pairs, checked."""
        arguments = cast("dict[str, object]", request)
        responses = arguments.get("responses", arguments.get("completions"))
        seed_generators(self._seed, responses)
        classes = vars(sys.modules[MODULE_NAME])
        inputs = with_snapshots(with_pixels(arguments), opens_pickles=True, classes=classes)
        returned = self._loop.settle(self._function(**inputs))
        return checked_results(returned, len(cast("list[object]", responses)))


def with_bytes(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments whose media hold their files' bytes: workers may run in another folder."""
    return _with_media(arguments, lambda media: media.in_memory(lambda file: file.read()))


def with_pixels(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments with media replaced by lists of what they decode to.

    Media are decoded once per prompt. Each response gets its copy: a function may draw on pixels.
    """
    decoded: dict[tuple[str, ...], list[object]] = {}

    def pixels(media: "Media") -> list[object]:
        key = tuple(medium.digest for medium in media)
        if key in decoded:
            return deepcopy(decoded[key])
        decoded[key] = [medium.decode() for medium in media]
        return decoded[key]

    return _with_media(arguments, pixels)


def _with_media(
    arguments: Mapping[str, object], change: "Callable[[Media], object]"
) -> dict[str, object]:
    names = [name for name in MEDIA_COLUMNS if name in arguments]
    if not names:
        return dict(arguments)
    # Imported here: workers without media stay small.
    from lightrft.engines.media.media import Media

    changed = {
        name: [
            change(value) if isinstance(value, Media) else value
            for value in cast("Sequence[object]", arguments[name])
        ]
        for name in names
    }
    return {**arguments, **changed}


class AwaitLoop:
    """One event loop for all calls, so that connections which a function opens may stay open."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def settle(self, returned: object) -> object:
        """Return the value after awaiting it and, if it is a list, all of its items together.

        Args:
            returned: Value, awaitable, or list of them.
        """
        if not can_wait(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_settled(returned))


def can_wait(returned: object) -> bool:
    """Return whether a value, or an item of a list, must be awaited."""
    is_list = isinstance(returned, list | tuple)
    return inspect.isawaitable(returned) or (
        is_list and any(map(inspect.isawaitable, cast("Sequence[object]", returned)))
    )


async def _settled(returned: object) -> object:
    value = await returned if inspect.isawaitable(returned) else returned
    if not can_wait(value):
        return value
    items = cast("Sequence[object]", value)
    return list(await asyncio.gather(*map(_settled, items)))


def describe_function(function: Callable[..., object]) -> Description:
    """Return the signature of a function in a form that can be sent between processes."""
    parameters: list[Parameter] = [
        {
            "name": parameter.name,
            "kind": parameter.kind.name,
            "is_required": parameter.default is parameter.empty,
        }
        for parameter in inspect.signature(function).parameters.values()
    ]
    whole_batch = vars(function).get("whole_batch") if inspect.isfunction(function) else None
    return {"parameters": parameters, "whole_batch": bool(whole_batch)}


def seed_generators(seed: int, responses: object) -> None:
    """Seed the global generators from the seed and the responses of the call alone.

    A random reward then does not depend on the worker or the time of the call.
    """
    text = json.dumps([seed, responses], default=repr).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())
    random.seed(number)
    for module, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], function)(number)


def _load(path: Path, name: str) -> Callable[..., object]:
    # Make imports from the file's folder work, as if the file were run as a script.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ReportedError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    spec.loader.exec_module(module)
    functions = {
        key: cast("Callable[..., object]", value)
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("__")
    }
    if name not in functions:
        listing = ", ".join(sorted(functions)) or "none"
        raise MissingFunctionError(
            f"{path} has no function {name!r}: it has {listing}" + nearest_names(name, functions)
        )
    return adapted(functions[name])


def checked_results(returned: object, num_responses: int) -> list[CheckedResult]:
    """Return (reward or None, components) of each response.

    Raises:
        ReportedError: The values are not one finite number or dict of numbers per response.
    """
    items = returned.tolist() if isinstance(returned, SupportsToList) else returned
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ReportedError(
            f"expected a list of {num_responses} numbers or dicts, got {type(returned).__name__}"
        )
    if len(items) != num_responses:
        raise ReportedError(
            f"expected one result per response, {num_responses} in all, got {len(items)}"
        )
    return [_checked_item(index, item) for index, item in enumerate(items)]


def _checked_item(index: int, item: object) -> CheckedResult:
    if item is None:
        return None, {}
    if not isinstance(item, Mapping):
        return finite_number(f"result {index}", item), {}
    if not item:
        raise ReportedError(f"result {index} is an empty dict: expected at least one number")
    numbers = {
        str(key): finite_number(f"result {index}, key {key!r}", value)
        for key, value in item.items()
    }
    return numbers.pop("reward", None), numbers


def finite_number(place: str, value: object) -> float:
    """Return the number that a user's code returned; True is 1.

    Args:
        place: Name of the value in the error.
        value: Number, or tensor or array of one number.

    Raises:
        ReportedError: The value is anything else, or not finite.
    """
    plain = value.tolist() if isinstance(value, SupportsToList) else value
    if not isinstance(plain, Real):
        raise ReportedError(f"{place}: expected a number, got {plain!r:.100}")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ReportedError(f"{place}: expected a finite number, got {number}")
    return number
