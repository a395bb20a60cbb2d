"""Facts about engines that need no started engine and no import of its package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def combines(*, top_k: int, top_p: float, min_p: float) -> bool:
    """Return whether two truncations act together; a single one is the same in all engines."""
    return (top_k != -1) + (top_p < 1) + (min_p > 0) > 1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine; the defaults are for an unknown engine.

    Args:
        builder: "module:name" of the function that starts it.
        package: Package that it needs, if any.
        versions: Tested versions of the package, from and below.
        holds_adapters: Whether it holds LoRA adapters beside its weights.
        draws_min_p: Whether it can draw by a seed from the tokens that min_p keeps.
        spans_ranks: Whether the ranks of a group share one engine (tensor parallelism).
        has_own_memory: Whether its weights and cache lie on the device beside the trainer's model.
        needs_share: Whether it refuses to start unless `engine_mem_util` of the device is free.
        has_known_order: Function that returns whether it applies truncations in the order of
            `lightrft.engines.sampling`.
    """

    builder: str = ""
    package: str = ""
    versions: tuple[tuple[int, ...], tuple[int, int]] = ((), (0, 0))
    holds_adapters: bool = False
    draws_min_p: bool = True
    spans_ranks: bool = False
    has_own_memory: bool = True
    needs_share: bool = False
    has_known_order: Callable[..., bool] = lambda **_: True
