"""Divergences between two distributions over the whole vocabulary.

With q the student and p the teacher, and m = beta p + (1 - beta) q:

    reverse   sum_v q (log q - log p)
    forward   sum_v p (log p - log q)
    jsd       beta KL(p || m) + (1 - beta) KL(q || m)

Source: Agarwal et al. 2024, arXiv:2306.13649, where jsd is generalised; its ends, 0 in themselves,
are the other two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.algorithms.interface import lookup


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(dim=-1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse": lambda student, teacher, _: _kl(student, teacher),
    "forward": lambda student, teacher, _: _kl(teacher, student),
    "jsd": _jsd,
}


def divergence(student: Tensor, teacher: Tensor, *, form: str, beta: float = 0.5) -> Tensor:
    """One divergence per token: [tokens].

    Args:
        student, teacher: [tokens, vocab] logits; gradients flow through both.
        form: A name in `DIVERGENCES`.
        beta: Weight of the teacher in the mixture of jsd, in (0, 1).

    Raises:
        ValueError: unknown form.
    """
    found = lookup(DIVERGENCES, form, kind="divergence")
    return found(student.log_softmax(dim=-1), teacher.log_softmax(dim=-1), beta)
