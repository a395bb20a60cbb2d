"""Log-probabilities over recorded kept ids: values and gradients against slow ones in float64."""

import pytest
import torch

from lightrft.engines.sampling import keep_support
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer
from lightrft.models import support
from lightrft.models.support import KeptSets, SamplingSupport, kept_logprobs
from lightrft.stages.policy.supports import kept_bounds

VOCAB, HIDDEN, TOKENS = 40, 8, 11


def drawn_case(dtype, *, with_bias):
    """States, layer, targets and kept sets that hold them; the third token has no record."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    bias = torch.randn(VOCAB, generator=generator, dtype=dtype) if with_bias else None
    sets = [
        torch.randperm(VOCAB, generator=generator)[: 1 + i].sort().values for i in range(TOKENS)
    ]
    targets = torch.stack([each[i % len(each)] for i, each in enumerate(sets)])
    sets[2] = sets[2][:0]
    sizes = torch.tensor([len(each) for each in sets])
    # In the order of other rows, with other numbers between them.
    ids = torch.cat([torch.tensor([7, 7]), *reversed(sets)]).int()
    starts = 2 + sizes.flip(0).cumsum(0).flip(0) - sizes
    return hidden, weight, bias, targets, sets, KeptSets(ids, starts, sizes, is_complete=False)


@pytest.mark.parametrize("gathered", [1, 50, 2**24])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_masked_softmax(
    monkeypatch, gathered, softcap, with_bias
):
    monkeypatch.setattr(support, "GATHERED", gathered)
    hidden, weight, bias, targets, sets, kept = drawn_case(torch.float64, with_bias=with_bias)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias) if each is not None]
    layer = OutputLayer(weight, bias, LogitsTransform(0.7, softcap))
    values = kept_logprobs(hidden, layer, targets, kept)
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = [
        (row[each].log_softmax(0)[each == target] if len(each) else row[:0]).sum()
        for row, target, each in zip(logits / 0.7, targets, sets, strict=True)
    ]
    slopes = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((values * slopes).sum(), leaves)
    theirs = torch.autograd.grad((torch.stack(expected) * slopes).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_in_bfloat16_values_are_float32_and_gradients_have_the_weights_dtype():
    hidden, weight, _, targets, _, kept = drawn_case(torch.bfloat16, with_bias=False)
    weight.requires_grad_()
    values = kept_logprobs(
        hidden, OutputLayer(weight, None, LogitsTransform(1.0, None)), targets, kept
    )
    values.sum().backward()
    assert (values.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16)
    wide = OutputLayer(weight.detach().double(), None, LogitsTransform(1.0, None))
    exact = kept_logprobs(hidden.double(), wide, targets, kept)
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("min_p_first", [False, True])
@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.7, "top_k": 9, "min_p": 0.05}],
    ids=str,
)
def test_what_rounding_may_change_lies_between_the_bounds_and_little_else(truncation, min_p_first):
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(300, VOCAB, generator=generator)
    rule, rounding = SamplingSupport(**truncation, min_p_first=min_p_first), 1e-2
    surely, maybe = kept_bounds(logits, rule, rounding)
    for _ in range(20):
        noise = rounding / 2 * (2 * torch.rand(logits.shape, generator=generator) - 1)
        kept = keep_support(
            logits + noise,
            top_k=rule.top_k,
            top_p=rule.top_p,
            min_p=rule.min_p,
            min_p_first=min_p_first,
        ).isfinite()
        assert not (surely & ~kept).any()
        assert not (kept & ~maybe).any()
    exact, _ = kept_bounds(logits, rule, 0.0)
    assert (maybe & ~surely).any()
    assert (maybe & ~surely).sum() < 0.2 * exact.sum()


def test_no_tokens_are_no_error():
    layer = OutputLayer(torch.randn(VOCAB, HIDDEN), None, LogitsTransform(1.0, None))
    none = torch.zeros(0, dtype=torch.int64)
    kept = KeptSets(torch.zeros(0, dtype=torch.int32), none, none, is_complete=True)
    assert kept_logprobs(torch.zeros(0, HIDDEN), layer, none, kept).shape == (0,)
