"""Divergence of two output projections, for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightrft.kernels.logprob.types import OutputLayer
from lightrft.models.types import Projected

# Logits of one model that exist at a time.
MAX_LOGITS = 2**24


class Targets(Protocol):
    """Teacher's side of a comparison with the student's tokens."""

    def compared(self, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the logits of student and teacher over the same outcomes, [rows, outcomes] each.

        Args:
            own: [rows, vocab] logits of the student, with their graph.
            rows: Slice of the tokens that they belong to.
        """
        ...

    def at(self, index: Tensor) -> Targets:
        """Return the targets of some of the tokens."""
        ...


def divergence_sum(
    student: Projected,
    teacher: Targets,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Return the sum over tokens of the divergence: [], differentiable by the student's numbers.

    Its gradients are computed in the same pass, so that logits exist only once and for some rows
    at a time.

    Args:
        student, teacher: Projections of the same tokens.
        divergence: Divergence of logits [rows, outcomes] of both: [rows].
        max_logits: Most logits of one model that exist at a time.
    """
    layer = student.layer
    parts = _Parts(layer, teacher, divergence, max_logits)
    total: Tensor = _DivergenceSum.apply(student.hidden, layer.weight, layer.bias, parts)  # type: ignore[no-untyped-call, unused-ignore]
    return total


@dataclass(frozen=True, slots=True)
class _Parts:
    layer: OutputLayer
    teacher: Targets
    divergence: Callable[[Tensor, Tensor], Tensor]
    max_logits: int

    def differentiated(self, leaves: list[Tensor], rows: slice) -> tuple[Tensor, list[Tensor]]:
        """Return the sum over some rows, and its gradients by hidden, weight and any bias."""
        hidden, weight, *bias = leaves
        layer = OutputLayer(weight, bias[0] if bias else None, self.layer.transform)
        logits = Projected(hidden, layer).logits(slice(None))
        total = self.divergence(*self.teacher.compared(logits, rows)).sum()
        return total.detach(), list(torch.autograd.grad(total, leaves))


class _DivergenceSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parts: _Parts,
    ) -> Tensor:
        size = max(1, parts.max_logits // weight.shape[0])
        fixed = [weight] if bias is None else [weight, bias]
        sums = [torch.zeros_like(each) for each in fixed]
        slopes = torch.zeros_like(hidden)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                leaves = [each.detach().requires_grad_() for each in (hidden[rows], *fixed)]
                value, gradients = parts.differentiated(leaves, rows)
            total += value.double()
            slopes[rows] = gradients[0]
            for slope, more in zip(sums, gradients[1:], strict=True):
                slope += more
        ctx.save_for_backward(slopes, *sums)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *outer: Tensor) -> tuple[Tensor | None, ...]:
        slopes, weight, *bias = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = outer[0]
        scaled = [(each * scale.to(each.dtype)) for each in (slopes, weight, *bias)]
        return (*scaled, *([] if bias else [None]), None)
