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
        return is_single or self.known_order != "other"
