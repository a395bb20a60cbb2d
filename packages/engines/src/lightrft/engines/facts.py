"""Facts about engines that need no started engine and no import of its package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine; the defaults are for an unknown engine.

    Args:
        builder: "module:name" of the function that starts it.
        package: Package that it needs, if any.
        holds_adapters: Whether it holds LoRA adapters beside its weights.
        draws_min_p: Whether it can draw by a seed from the tokens that min_p keeps.
        spans_ranks: Whether the ranks of a group share one engine (tensor parallelism).
        has_own_memory: Whether its weights and cache lie on the device beside the trainer's model.
        needs_share: Whether it refuses to start unless `engine_mem_util` of the device is free.
        known_order: Truncations that it applies in the order of `lightrft.engines.sampling`: all,
            all but min_p, or none that act together.
    """

    builder: str = ""
    package: str = ""
    holds_adapters: bool = False
    draws_min_p: bool = True
    spans_ranks: bool = False
    has_own_memory: bool = True
    needs_share: bool = False
    known_order: Literal["all", "without min_p", "none"] = "all"

    def has_known_order(self, *, top_k: int, top_p: float, min_p: float) -> bool:
        """Return whether these truncations act in the known order; a single one always does."""
        is_single = (top_k != -1) + (top_p < 1) + (min_p > 0) < 2
        is_known = self.known_order == "without min_p" and min_p == 0
        return is_single or is_known or self.known_order == "all"
