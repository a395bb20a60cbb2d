"""Facts about engines by name, which need no import of their package, and their construction."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, Protocol, cast

from lightrft.kernels.names import nearest_names

if TYPE_CHECKING:
    from torch import nn

    from lightrft.engines.base import RolloutEngine
    from lightrft.engines.types import EngineConfig


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine; the defaults are for an unknown engine.

    Args:
        builder: "module:name" of the function that starts it.
        package: Package that it needs, if any.
        holds_adapters: Whether it holds LoRA adapters beside its weights.
        takes_packed: Whether it takes the codes of a frozen base of 4 bits below these adapters.
        draws_min_p: Whether it can draw by a seed from the tokens that min_p keeps.
        spans_ranks: Whether the ranks of a group share one engine (tensor parallelism).
        has_own_memory: Whether its weights and cache lie on the device beside the trainer's model.
        needs_share: Whether it refuses to start unless `engine_mem_util` of the device is free.
        known_order: Order in which it truncates: that of `lightrft.engines.sampling`, that with
            min_p before both others, or another one.
    """

    builder: str = ""
    package: str = ""
    holds_adapters: bool = False
    takes_packed: bool = False
    draws_min_p: bool = True
    spans_ranks: bool = False
    has_own_memory: bool = True
    needs_share: bool = False
    known_order: Literal["min_p last", "min_p first", "other"] = "min_p last"

    def has_known_order(self, *, top_k: int, top_p: float, min_p: float) -> bool:
        """Return whether it is known what these truncations keep together."""
        is_single = (top_k != -1) + (top_p < 1) + (min_p > 0) < 2
        return is_single or self.known_order in ("min_p last", "min_p first")


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
    known = [*ENGINES, "auto"]
    hint = nearest_names(engine_type, known)
    raise ValueError(f"unknown engine_type {engine_type!r}{hint}; known: {', '.join(known)}")


def _is_usable(package: str) -> bool:
    import torch

    return bool(package and torch.cuda.is_available() and importlib.util.find_spec(package))
