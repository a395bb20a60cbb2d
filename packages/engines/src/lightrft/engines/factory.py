"""Choice and construction of an engine by name."""

from __future__ import annotations

import importlib.util
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, cast

from lightrft.engines.facts import EngineFacts
from lightrft.kernels.names import nearest_names

if TYPE_CHECKING:
    from torch import nn

    from lightrft.engines.base import RolloutEngine
    from lightrft.engines.types import EngineConfig


class EngineBuilder(Protocol):
    """Function that starts one kind of engine; an attribute `facts` describes the engine."""

    def __call__(self, config: EngineConfig, *, module: nn.Module | None = None) -> RolloutEngine:
        """Start the engine; `module` provides the architecture if the engine can use it."""


# Name -> module with the engine's `FACTS`, or a builder (the function or its `module:name`).
# "auto" takes the first whose package is installed.
ENGINES: dict[str, str | EngineBuilder] = {
    "vllm": "lightrft.engines.vllm.facts",
    "sglang": "lightrft.engines.sglang.facts",
    "hf": "lightrft.engines.hf.facts",
}
_UNKNOWN = EngineFacts()


def engine_facts(engine_type: str | None) -> EngineFacts:
    """Return facts about an engine; the defaults for an unknown name, "auto" or None."""
    place = ENGINES.get(engine_type or "")
    if isinstance(place, str) and ":" not in place:
        return cast("EngineFacts", resolve_name(f"{place}:FACTS"))
    return getattr(place, "facts", _UNKNOWN)


def build_engine(config: EngineConfig, *, module: nn.Module | None = None) -> RolloutEngine:
    """Start the engine that `config.engine_type` names.

    Args:
        config: Settings of the engine; "auto" is resolved by `resolve_engine_type`.
        module: Transformers model whose architecture the "hf" engine takes instead of reading
            `config.model_path`, and "vllm" if that path is empty. The engine copies its weights.

    Raises:
        ValueError: The name is unknown.
        ImportError: The backend's package is not installed.
    """
    engine_type = resolve_engine_type(config.engine_type)
    builder = ENGINES[engine_type]
    if isinstance(builder, str):
        builder = resolve_name(engine_facts(engine_type).builder or builder)
    return cast("EngineBuilder", builder)(config, module=module)


def resolve_engine_type(engine_type: str) -> str:
    """Return the name of the engine to start, the best available for "auto".

    "auto" takes vllm if it is importable and there is a GPU, else sglang likewise, else hf.

    Raises:
        ValueError: The name is unknown.
        ImportError: The backend's package is not installed.
    """
    if engine_type == "auto":
        packages = {name: engine_facts(name).package for name in ENGINES}
        return next((name for name, package in packages.items() if _is_usable(package)), "hf")
    package = engine_facts(engine_type).package
    if package and importlib.util.find_spec(package) is None:
        raise ImportError(
            f"engine {engine_type!r} needs the package {package!r}, which is not installed; "
            f"install lightrft[{engine_type}] or choose engine_type='hf'"
        )
    if engine_type in ENGINES:
        return engine_type
    known = ", ".join(sorted(ENGINES))
    hint = nearest_names(engine_type, [*ENGINES, "auto"])
    raise ValueError(f"unknown engine_type {engine_type!r}{hint}; known: auto, {known}")


def _is_usable(package: str) -> bool:
    import torch

    return bool(package and torch.cuda.is_available() and importlib.util.find_spec(package))
