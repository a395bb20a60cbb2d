"""A divergence of two output projections, for some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lightrft.kernels.logprob.types import OutputLayer, apply_transform

# Logits of one of the models that exist at a time.
MAX_LOGITS = 2**24


@dataclass(frozen=True, slots=True)
class Projected:
    """Hidden states [tokens, hidden] and the layer that makes logits of them.

    Args:
        hidden: Hidden states of the scored tokens of this rank.
        layer: Whole on this rank.
        rows, columns: [tokens] places of these tokens in the batch; None inside the layer.
    """

    hidden: Tensor
    layer: OutputLayer
    rows: Tensor | None = None
    columns: Tensor | None = None

    def logits(self, rows: slice) -> Tensor:
        """[rows, vocab] in float32 or float64."""
        hidden, layer = self.hidden[rows], self.layer
        product = F.linear(hidden, layer.weight.to(hidden.dtype))
        wide = product if product.dtype == torch.float64 else product.float()
        return apply_transform(wide, layer.bias, layer.transform)

    def compared(self, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """See `Targets`. Ids that only the teacher has, beyond any token, are left out."""
        return own, self.logits(rows).detach()[:, : own.shape[1]]

    def at(self, index: Tensor) -> Projected:
        """Return some of the tokens."""
        rows, columns = (
            None if each is None else each[index] for each in (self.rows, self.columns)
        )
        return Projected(self.hidden[index], self.layer, rows, columns)


class Targets(Protocol):
    """The teacher's side of a comparison with the student's tokens."""

    def compared(self, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the logits of student and teacher over the same outcomes, [rows, outcomes] each.

        Args:
            own: [rows, vocab] logits of the student, with their graph.
            rows: Which of the tokens they are of.
        """
        ...

    def at(self, index: Tensor) -> Targets:
        """Return those of some of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class HeadReader:
    """A loss [] of what an output projection is given, in its place.

    Args:
        read: Is called while the weights of the layer are whole on this rank.
    """

    read: Callable[[Projected], Tensor]


def divergence_sum(
    student: Projected,
    teacher: Targets,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Return the sum over tokens of the divergence: [], differentiable by the student's numbers.

    Its gradients are computed beside it, so that logits exist for some rows at a time and never
    again.

    Args:
        student, teacher: Of the same tokens.
        divergence: Divergence of logits [rows, outcomes] of both: [rows].
        max_logits: Of one of them that exist at a time.
    """
    layer = student.layer
    parts = _Parts(layer, teacher, divergence, max_logits)
    found: Tensor = _DivergenceSum.apply(  # type: ignore[no-untyped-call]
        student.hidden, layer.weight, layer.bias, parts
    )
    return found


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
        own = Projected(hidden, layer).logits(slice(None))
        total = self.divergence(*self.teacher.compared(own, rows)).sum()
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
            for own, more in zip(sums, gradients[1:], strict=True):
                own += more
        ctx.save_for_backward(slopes, *sums)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *outer: Tensor) -> tuple[Tensor | None, ...]:
        slopes, weight, *bias = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = outer[0]
        scaled = [(each * scale.to(each.dtype)) for each in (slopes, weight, *bias)]
        return (*scaled, *([] if bias else [None]), None)
