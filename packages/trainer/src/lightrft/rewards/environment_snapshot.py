"""Attributes of an environment at the end of its episode, for reward functions that read them.

Environments run in other processes. They send JSON, in which other values are pickles. Only the
process of a reward function opens these, and only when they are read. A model's actions may have
written them, so they make values of known types and run no code.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import cast

from lightrft.rewards.types import ENVIRONMENTS, KeptEnvironment
from lightrft.rewards.worker import ReportedError

# Limit of one attribute; what is longer is no state of an episode.
MAX_ATTRIBUTE_BYTES = 1 << 20
# Callables that make values, by module.
_MAKERS: Mapping[str, frozenset[str]] = {
    "builtins": frozenset(("bytearray", "complex", "frozenset", "range", "set", "slice")),
    "collections": frozenset(("Counter", "OrderedDict", "defaultdict", "deque")),
    "datetime": frozenset(("date", "datetime", "time", "timedelta", "timezone")),
    "decimal": frozenset(("Decimal",)),
    "fractions": frozenset(("Fraction",)),
    "pathlib": frozenset(("Path", "PosixPath", "PurePath", "PurePosixPath")),
    "pathlib._local": frozenset(("Path", "PosixPath", "PurePath", "PurePosixPath")),
    "numpy": frozenset(("dtype", "ndarray")),
    "numpy._core.multiarray": frozenset(("_reconstruct", "scalar")),
    "numpy._core.numeric": frozenset(("_frombuffer",)),
}
_NO_CLASSES: Mapping[str, object] = MappingProxyType({})


class UnreadableAttributeError(ReportedError):
    """An attribute of an environment could not be brought to a reward function."""


class EnvironmentSnapshot:
    """The public attributes of an environment, to be read.

    `isinstance` takes it for the author's class if the reward's file has that class.

    Args:
        kept: Attributes of the environment.
        opens_pickles: Whether this process may run what it unpickles.
        classes: Classes of the reward's file by name.
    """

    __slots__ = ("_classes", "_kept", "_opens_pickles")
    _classes: Mapping[str, object]
    _kept: KeptEnvironment
    _opens_pickles: bool

    def __init__(
        self,
        kept: KeptEnvironment,
        *,
        opens_pickles: bool,
        classes: Mapping[str, object] = _NO_CLASSES,
    ) -> None:
        for name, value in zip(self.__slots__, (classes, kept, opens_pickles), strict=True):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        cls = self._classes.get(self._kept.class_name)
        return cls if isinstance(cls, type) else EnvironmentSnapshot

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        kept = self._kept
        place = f"attribute {name!r} of the environment {kept.class_name}".rstrip()
        if name not in kept.attributes:
            listing = ", ".join(sorted(kept.attributes)) or "none, since its episode failed"
            raise AttributeError(f"no {place}: kept are its public attributes, {listing}")
        attribute = kept.attributes[name]
        if "json" in attribute:
            return attribute["json"]
        if "error" in attribute:
            raise UnreadableAttributeError(f"{place} cannot be read: {attribute['error']}")
        if not self._opens_pickles:
            raise UnreadableAttributeError(
                f"{place} is neither number, text, list nor dict, which alone are read in the "
                "trainer's process: give the reward as FILE.py:FUNCTION"
            )
        try:
            return _ValueUnpickler(io.BytesIO(base64.b64decode(str(attribute["pickle"])))).load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UnreadableAttributeError(f"{place} cannot be read here: {reason}") from error

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"attribute {name!r} cannot be set: environments are to be read here")

    def __repr__(self) -> str:
        return f"<snapshot of {self._kept.class_name}>"


def with_snapshots(
    arguments: Mapping[str, object],
    *,
    opens_pickles: bool,
    classes: Mapping[str, object] = _NO_CLASSES,
) -> dict[str, object]:
    """Return a reward function's arguments with its environments as `EnvironmentSnapshot`."""
    if ENVIRONMENTS not in arguments:
        return dict(arguments)
    kept = cast("Sequence[KeptEnvironment]", arguments[ENVIRONMENTS])
    shown = [EnvironmentSnapshot(k, opens_pickles=opens_pickles, classes=classes) for k in kept]
    return {**arguments, ENVIRONMENTS: shown}


def keep_attributes(environment: object) -> dict[str, dict[str, object]]:
    """Return the public attributes and properties of an environment, without methods."""
    attributes = {}
    for name in dir(environment):
        if name.startswith("_"):
            continue
        try:
            value: object = getattr(environment, name)
            if not inspect.isroutine(value):
                attributes[name] = _encoded(value)
        except Exception as error:  # noqa: BLE001 - shown to whoever reads it
            attributes[name] = {"error": f"{type(error).__name__}: {error}"}
    return attributes


def _encoded(value: object) -> dict[str, object]:
    try:
        text = json.dumps(value, allow_nan=False)
        if len(text) <= MAX_ATTRIBUTE_BYTES and json.loads(text) == value:
            return {"json": value}
    except (TypeError, ValueError, RecursionError):
        pass
    buffer = _Bounded()
    pickle.Pickler(buffer).dump(value)
    return {"pickle": base64.b64encode(buffer.getvalue()).decode()}


class _ValueUnpickler(pickle.Unpickler):
    """Reads values of the types of `_MAKERS`."""

    def find_class(self, module: str, name: str) -> object:
        """Return what makes a value, wrapped so that a pickle can set no attribute on it."""
        if name not in _MAKERS.get(module, ()):
            raise pickle.UnpicklingError(
                f"it holds {module}.{name}: keep numbers, texts, lists, dicts, sets, dates, paths "
                "and arrays of NumPy"
            )
        maker = cast("Callable[..., object]", getattr(import_module(module), name))
        # An argument of what makes arrays, and without attributes to set.
        return maker if (module, name) == ("numpy", "ndarray") else partial(maker)


class _Bounded(io.BytesIO):
    def write(self, data: object) -> int:
        written = super().write(cast("bytes", data))
        if self.tell() > MAX_ATTRIBUTE_BYTES:
            raise ValueError(f"it has more than {MAX_ATTRIBUTE_BYTES} bytes")
        return written
