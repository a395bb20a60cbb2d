"""Experts of mixture-of-experts models in the two stacks of a vLLM layer, by checkpoint name.

`w13_weight` [experts, 2 * width, hidden] holds each expert's gate and, after it, its up projection;
`w2_weight` [experts, hidden, width] the down projections. Transformers keeps the same two stacks
(`experts.gate_up_proj`, `experts.down_proj`); its checkpoints on disk split them by expert
(`experts.3.gate_proj.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

# vLLM's backends that compute with the stacks as loaded. Others swap gate and up, shuffle or pack
# them (`convert_to_unquantized_kernel_format`, `process_weights_after_loading`).
PLAIN_BACKENDS = {"TRITON", "BATCHED_TRITON"}
PACKED_ON_CPU = "CPU"

_STACK = re.compile(r"^(?P<layer>.+\.experts)\.(?P<part>gate_up_proj|down_proj)$")
_SPLIT = re.compile(
    r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$"
)


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """Place of a checkpoint parameter in the stacks of a layer.

    Args:
        module_name: Name of vLLM's module that holds the stacks.
        attribute: Name of the stack.
        expert: Number of the expert; None for all of them.
        half: Half of the expert's rows: 1 for the second, else 0.
        num_halves: Number of halves: 2 if the parameter is one half of the expert's rows, else 1.
    """

    module_name: str
    attribute: str
    expert: int | None
    half: int = 0
    num_halves: int = 1

    def first_row(self, rows_per_expert: int) -> int:
        """Return the parameter's first row among the rows of all experts.

        Args:
            rows_per_expert: Second dimension of the stack.
        """
        return (self.expert or 0) * rows_per_expert + self.half * rows_per_expert // 2

    def num_rows(self, num_experts: int, rows_per_expert: int) -> int:
        """Return the parameter's number of rows among those of all experts."""
        experts = num_experts if self.expert is None else 1
        return experts * rows_per_expert // self.num_halves


def expert_slot(name: str) -> ExpertSlot | None:
    """Return the slot of a checkpoint name under vLLM's prefix; None if it is no expert."""
    match = _STACK.match(name) or _SPLIT.match(name)
    if match is None:
        return None
    part = match["part"].partition("_proj")[0]
    module_name = f"{match['layer']}.routed_experts"
    expert = int(match["expert"]) if "expert" in match.groupdict() else None
    if part == "down":
        return ExpertSlot(module_name, "w2_weight", expert)
    if part == "gate_up":
        return ExpertSlot(module_name, "w13_weight", expert)
    return ExpertSlot(module_name, "w13_weight", expert, half=int(part == "up"), num_halves=2)


def backend_name(module: nn.Module) -> str:
    """Return the name of the backend that computes a layer's experts; "" if unknown."""
    method = getattr(module, "quant_method", None)
    return str(getattr(getattr(method, "unquantized_backend", None), "value", ""))


def repack_on_cpu(modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Pack the reloaded stacks, which vLLM does only after the first load.

    vLLM 0.32: `UnquantizedFusedMoEMethod._setup_kernel` skips it if the kernel exists.

    Args:
        modules: vLLM's modules by name.
        names: Names of modules that received all their tensors.
    """
    for name in names:
        module = modules[name]
        if backend_name(module) == PACKED_ON_CPU:
            kernel = module.quant_method.moe_kernel  # type: ignore[union-attr]
            kernel.fused_experts.process_weights_after_loading(module)  # type: ignore[operator,union-attr]
