"""Facts about engines that are known without starting one, or importing its package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def combines(*, top_k: int, top_p: float, min_p: float) -> bool:
    """Return whether two truncations act together: one alone is the same everywhere."""
    return (top_k != -1) + (top_p < 1) + (min_p > 0) > 1


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine; the defaults are those of one that nothing is known about.

    Args:
        builder: "module:name" of what starts it.
        package: Package that it needs, if any.
        versions: Tested versions of the package, from and below.
        holds_adapters: It holds LoRA adapters beside its weights.
        draws_min_p: It can draw by a seed from what min_p keeps.
        spans_ranks: One engine is shared by the ranks of a group (tensor parallelism).
        has_own_memory: Its weights and cache lie on the device beside the trainer's model.
        needs_share: It refuses to start where `engine_mem_util` of the device is not free.
        has_known_order: Whether what it keeps under these truncations follows from the logits as
            in `lightrft.engines.sampling`.
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
