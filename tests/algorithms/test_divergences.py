"""Divergences over the whole vocabulary: worked numbers, and gradients in chunks of rows."""

import math
from functools import partial

import pytest
import torch

from lightrft.algorithms.kl import DIVERGENCES, divergence, top_and_tail, with_tail
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models.divergence import divergence_sum
from lightrft.models.types import Projected
from lightrft.stages.distillation.served_rows import TopTokens

Q = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.6, 0.2, 0.1, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    "form, value", [("reverse", 0.0566411612), ("forward", 0.0570681197), ("jsd", 0.0140741616)]
)
def test_worked_numbers(form, value):
    found = divergence(Q.log() + 3.0, P.log() - 1.0, form=form)
    assert float(found) == pytest.approx(value, abs=1e-10)


for_every_form = pytest.mark.parametrize("form", DIVERGENCES)


@for_every_form
def test_a_distribution_has_no_distance_from_itself_and_some_from_others(form):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert divergence(logits, logits + 2.0, form=form, beta=0.3).abs().max() < 1e-12
    assert divergence(logits, logits.flip(1), form=form, beta=0.3).min() > 0.01


@pytest.mark.parametrize(
    "form, k, value",
    [("forward", 1, 0.0201355136), ("reverse", 1, 0.0204109973), ("forward", 2, 0.0282999125)],
)
def test_worked_numbers_with_a_tail(form, k, value):
    best = P.topk(k).indices
    found = divergence(
        top_and_tail(Q.log() + 3.0, best), with_tail(P.log().gather(-1, best)), form=form
    )
    assert float(found) == pytest.approx(value, abs=1e-10)


def buckets(logits, token_ids):
    """The coarser distribution of one row, one outcome after another."""
    whole = logits.softmax(0).tolist()
    chosen = [whole[i] for i in token_ids]
    return [*chosen, sum(p for i, p in enumerate(whole) if i not in token_ids)]


@for_every_form
@pytest.mark.parametrize("k", [1, 3, 10])
def test_a_tail_makes_a_divergence_that_loses_only_what_lies_in_it(form, k):
    generator = torch.Generator().manual_seed(k)
    own, other = 2 * torch.randn(2, 40, 11, generator=generator, dtype=torch.float64)
    best = other.topk(k).indices
    coarse_own, coarse = top_and_tail(own, best), with_tail(other.log_softmax(-1).gather(-1, best))
    for row in range(40):
        for found, logits in ((coarse_own, own), (coarse, other)):
            expected = [math.log(p) for p in buckets(logits[row], best[row].tolist())]
            assert found[row].tolist() == pytest.approx(expected, abs=1e-9)
    found = divergence(coarse_own, coarse, form=form, beta=0.3)
    whole = divergence(own, other, form=form, beta=0.3)
    assert found.min() >= 0
    assert bool((found <= whole + 1e-9).all())
    assert divergence(coarse, coarse, form=form).abs().max() < 1e-9
    if k == 10:  # one token is left
        assert (found - whole).abs().max() < 1e-9


def test_all_tokens_leave_no_tail():
    with pytest.raises(ValueError, match="4 tokens of a vocabulary of 4 leave no tail"):
        top_and_tail(Q.log(), torch.arange(4)[None])


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


@for_every_form
@pytest.mark.parametrize("softcap, has_bias", [(None, True), (4.0, False)])
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


@for_every_form
def test_chunks_with_a_tail_have_the_value_and_the_gradient_of_the_whole(form):
    student, teacher = projections(5)
    best = teacher.logits(slice(None))[:, :11].log_softmax(-1).topk(3)
    top, index = TopTokens(best.indices, best.values), torch.tensor([0, 3, 4])
    leaves = [student.hidden.requires_grad_(), student.layer.weight.requires_grad_()]
    loss = partial(divergence, form=form, beta=0.3)
    found = divergence_sum(student.at(index), top.at(index), loss, max_logits=22)
    own = top_and_tail(student.logits(slice(None))[index], best.indices[index])
    expected = loss(own, with_tail(best.values[index])).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


def test_no_tokens_are_a_loss_of_0_with_gradients():
    student, teacher = projections(0)
    student.layer.weight.requires_grad_()
    found = divergence_sum(student, teacher, partial(divergence, form="jsd"))
    found.backward()
    assert float(found) == 0.0
    assert float(student.layer.weight.grad.abs().max()) == 0.0
