"""What decides whether a kernel may be used has to see a kernel that is wrong."""

from __future__ import annotations

import pytest
import torch

from lightrft.kernels.logprob import selection, self_tests
from lightrft.kernels.logprob.chunked_engine import ChunkedEngine
from lightrft.kernels.logprob.self_tests import gradient_error, run_once
from lightrft.kernels.logprob.types import LogitsTransform, OutputLayer

CPU = torch.device("cpu")


class Faulty(ChunkedEngine):
    """Loses the target's entry of one row."""

    def grad_logits(self, rows, chunk, first_column):
        grad = super().grad_logits(rows, chunk, first_column)
        grad[5, 0] = 0
        return grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_gradients_pass(dtype):
    assert gradient_error(ChunkedEngine(1000), CPU, dtype) < 1e-5


def test_one_lost_entry_fails():
    error = gradient_error(Faulty(1000), CPU, torch.float32)
    assert error > self_tests._MAX_GRADIENT_ERROR


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
def test_one_run_is_what_a_call_computes(entropy):
    hidden, layer, _, _ = self_tests._problem(CPU, torch.float32)
    rows, grad = run_once(ChunkedEngine(400), hidden[:7], layer, entropy)
    leaf = hidden[:7].double().requires_grad_()
    logits = leaf @ layer.weight.double().T
    logits.retain_grad()
    log_p = torch.log_softmax(logits, 1)
    value = log_p[:, 0].sum()
    if entropy == "grad":
        value = value - (log_p.exp() * log_p).sum()
    value.backward()
    assert torch.allclose(rows.logprobs.double(), log_p[:, 0].detach(), atol=5e-5)
    assert grad.shape == (7, 400)
    assert torch.allclose(grad.double(), logits.grad[:, :400], atol=2e-5)


@pytest.mark.parametrize(("num_tokens", "num_columns"), [(0, 9), (4, 0)])
def test_nothing_is_timed_where_there_is_nothing_to_compute(monkeypatch, num_tokens, num_columns):
    first, second = ChunkedEngine(8), ChunkedEngine(16)
    monkeypatch.setattr(selection, "select_engines", lambda *_: [first, second])
    request = selection.Request.of(
        "auto",
        "fp32",
        "False",
        "grad",
        temperature=1.0,
        has_bias=False,
        has_softcap=False,
        chunk_columns=8,
    )
    layer = OutputLayer(torch.randn(num_columns, 3), None, LogitsTransform(1.0, None))
    assert selection.choose_engine(request, torch.randn(num_tokens, 3), layer) is first
