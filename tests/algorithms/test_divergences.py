"""Divergences over the whole vocabulary: worked numbers, and gradients in chunks of rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightrft.algorithms.kl import DIVERGENCES, divergence
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models.divergence import Projected, divergence_sum

Q = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.6, 0.2, 0.1, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "value"),
    [("reverse", 0.0566411612), ("forward", 0.0570681197), ("jsd", 0.0140741616)],
)
def test_worked_numbers(form, value):
    found = divergence(Q.log() + 3.0, P.log() - 1.0, form=form)
    assert float(found) == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize("form", DIVERGENCES)
def test_a_distribution_has_no_distance_from_itself_and_some_from_others(form):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert divergence(logits, logits + 2.0, form=form, beta=0.3).abs().max() < 1e-12
    assert divergence(logits, logits.flip(1), form=form, beta=0.3).min() > 0.01


def test_an_unknown_form_names_the_known_ones():
    with pytest.raises(ValueError, match="reverse"):
        divergence(Q, P, form="revers")


def projections(num_tokens, *, softcap=None, has_bias=True):
    """A student of 11 ids, and a teacher of another width with 3 ids more."""
    generator = torch.Generator().manual_seed(num_tokens)

    def projected(width, vocab, scale):
        hidden, weight = (
            torch.randn(num_tokens, width, generator=generator),
            torch.randn(vocab, width, generator=generator),
        )
        bias = torch.randn(vocab, generator=generator).double() if has_bias else None
        layer = OutputLayer(weight.double(), bias, LogitsTransform(scale, softcap))
        return Projected(hidden.double(), layer)

    return projected(5, 11, 1.3), projected(6, 14, 0.8)


def plain(student, teacher, form):
    """All logits at once, one row after another."""
    total = 0.0
    for row in range(len(student.hidden)):
        q, p = (each.logits(slice(row, row + 1)) for each in (student, teacher))
        total = total + divergence(q, p[:, : q.shape[1]], form=form, beta=0.3).sum()
    return total


@pytest.mark.parametrize("form", DIVERGENCES)
@pytest.mark.parametrize(("softcap", "has_bias"), [(None, True), (4.0, False)])
@pytest.mark.parametrize("max_logits", [1, 25, 10**6])
def test_chunks_have_the_value_and_the_gradient_of_the_whole(form, softcap, has_bias, max_logits):
    student, teacher = projections(7, softcap=softcap, has_bias=has_bias)
    layer = student.layer
    leaves = [each for each in (student.hidden, layer.weight, layer.bias) if each is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = partial(divergence, form=form, beta=0.3)
    found = divergence_sum(student, teacher, loss, max_logits=max_logits)
    expected = plain(student, teacher, form)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    pairs = zip(
        torch.autograd.grad(-0.7 * found, leaves),
        torch.autograd.grad(-0.7 * expected, leaves),
        strict=True,
    )
    for own, wanted in pairs:
        assert (own - wanted).norm() <= 1e-10 * wanted.norm()


@pytest.mark.parametrize("form", DIVERGENCES)
def test_the_gradient_equals_finite_differences(form):
    student, teacher = projections(3)
    student.hidden.requires_grad_()
    loss = partial(divergence, form=form, beta=0.3)
    (slope,) = torch.autograd.grad(divergence_sum(student, teacher, loss), [student.hidden])
    direction = torch.randn(3, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    values = []
    for step in (1e-6, -1e-6):
        moved = Projected((student.hidden + step * direction).detach(), student.layer)
        values.append(float(divergence_sum(moved, teacher, loss)))
    difference = (values[0] - values[1]) / 2e-6
    assert float((slope * direction).sum()) == pytest.approx(difference, rel=1e-6, abs=1e-9)


def test_no_tokens_are_a_loss_of_0_with_gradients():
    student, teacher = projections(0)
    student.layer.weight.requires_grad_()
    found = divergence_sum(student, teacher, partial(divergence, form="jsd"))
    found.backward()
    assert float(found) == 0.0
    assert float(student.layer.weight.grad.abs().max()) == 0.0
