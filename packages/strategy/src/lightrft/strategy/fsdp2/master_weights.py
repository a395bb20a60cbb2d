"""AdamW on float32 copies of bfloat16 parameters."""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightrft.strategy.optimizers import AdamSettings, ParameterGroup


class MasterWeightsAdamW(torch.optim.Optimizer):
    """AdamW whose state holds a float32 master of every parameter.

    The update is computed on the masters, which are then rounded into the parameters, so that
    steps smaller than half a bfloat16 unit add up instead of being lost.

    Source: Micikevicius et al. 2017, arXiv:1710.03740, sec. 3.1; Loshchilov & Hutter 2017,
    arXiv:1711.05101, algorithm 2.

    Args:
        groups: Parameter groups.
        settings: Learning rate and the like; groups may override the decay.
    """

    def __init__(self, groups: Iterable[ParameterGroup], settings: AdamSettings) -> None:
        # `fused` is read when states are loaded: its counters lie beside the parameters.
        super().__init__(groups, {**dataclasses.asdict(settings), "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            ValueError: A closure was given.
        """
        if closure is not None:
            raise ValueError("MasterWeightsAdamW takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            beta1, beta2 = group["betas"]
            adamw(
                [state["master"] for state in states],
                [parameter.grad.float() for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, state in zip(parameters, states, strict=True):
                parameter.copy_(state["master"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["master"] = parameter.detach().float().clone()
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
        return state
