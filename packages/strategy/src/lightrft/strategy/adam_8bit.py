"""AdamW with moments of 8 bits, computed by bitsandbytes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightrft.engines.nf4 import bitsandbytes, table_8bit
from lightrft.strategy.optimizers import SCALE, AdamSettings, ParameterGroup, adam_step

BLOCK_SIZE = 256
# Smaller tensors have float32 moments: they are norms and biases, whose errors weigh the most.
MIN_8BIT_SIZE = 4_096


class Adam8bit(Optimizer):
    """AdamW whose moments are codes of 8 bits with one scale for every 256 values.

    A step is Adam's on the decoded moments; each is then rounded to a neighbouring code again.
    Codes are 256 numbers between -1 and 1 (between 0 and 1), at most 0.015 apart, times the block's
    largest value. For one process only: blocks of shards differ from those of the whole.

    Source: Dettmers et al. 2021, arXiv:2110.02861, sec. 2; Loshchilov & Hutter 2017,
    arXiv:1711.05101, algorithm 2.

    Args:
        groups: Parameter groups of float32 parameters.
        settings: Learning rate and the like; groups may override the decay.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    def __init__(self, groups: Iterable[ParameterGroup], settings: AdamSettings) -> None:
        super().__init__(groups, asdict(settings))
        bitsandbytes()  # is there

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            ValueError: A closure was passed.
        """
        if closure is not None:
            raise ValueError("Adam8bit takes no closure")
        for group in self.param_groups:
            settings = AdamSettings.of(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                parts = {key: _local(value) for key, value in state.items()}
                weights, gradient = _local(parameter), _local(parameter.grad)
                if "exp_avg" + SCALE in state:
                    self._update(weights, gradient, parts, settings)
                else:
                    adam_step([weights], [gradient], [parts], settings, fused=False)

    def _update(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        settings: AdamSettings,
    ) -> None:
        state["step"].add_(1)
        bitsandbytes().optimizer_update_8bit_blockwise(
            "adam",
            gradient.contiguous(),
            weights,
            state["exp_avg"],
            state["exp_avg_sq"],
            *settings.betas,
            0.0,
            0.0,
            settings.eps,
            int(state["step"]),
            settings.lr,
            table_8bit(weights.device),
            table_8bit(weights.device, signed=False),
            state["exp_avg" + SCALE],
            state["exp_avg_sq" + SCALE],
            weight_decay=settings.weight_decay,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if state:
            return state
        state["step"] = torch.zeros(())
        is_small = parameter.numel() < MIN_8BIT_SIZE
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = torch.float32 if is_small else torch.uint8
            state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if not is_small:
                num_blocks = -(-parameter.numel() // BLOCK_SIZE)
                state[name + SCALE] = torch.zeros(num_blocks, device=parameter.device)
        return state


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
