"""KL estimators and controllers."""

import numpy as np
import pytest
import torch

from lightrft.algorithms.kl import KL_ESTIMATORS, KlController, estimate_kl

K3 = (
    [0.018731, 0.018731, 0.091825, 0.021403, 0.091825, 0.106531],
    [0.030212, 0.030212, -0.081971, -0.0369, -0.081971, 0.065578],
)
K2 = (
    [0.02, 0.02, 0.08, 0.02, 0.08, 0.125],
    [0.033333, 0.033333, -0.066667, -0.033333, -0.066667, 0.083333],
)
WORKED = {  # tokens, token-mean gradient
    "k1": ([0.2, 0.2, -0.4, -0.2, -0.4, 0.5], [1 / 6] * 6),
    "abs": ([0.2, 0.2, 0.4, 0.2, 0.4, 0.5], [1 / 6, 1 / 6, -1 / 6, -1 / 6, -1 / 6, 1 / 6]),
    "k3": K3,
    "k3_unclamped": K3,
    "k1+": ([0.2, 0.2, -0.4, -0.2, -0.4, 0.5], K2[1]),
    "k2": K2,
    "k3+": (K3[0], K2[1]),
    "k1_is": (
        [0.269972, 0.180967, -0.728848, -0.109762, -0.219525, 1.660058],
        [0.269972, 0.180967, 0.182212, 0.073175, 0.054881, 0.830029],
    ),
    "k2_is": (
        [0.026997, 0.018097, 0.14577, 0.010976, 0.043905, 0.415015],
        [0.044995, 0.030161, -0.121475, -0.018294, -0.036587, 0.276676],
    ),
    "k3_is": (
        [0.025284, 0.016948, 0.167316, 0.011746, 0.050394, 0.353694],
        [0.044995, 0.030161, -0.121475, -0.018294, -0.036587, 0.276676],
    ),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_worked_numbers_with_nan_in_the_padding(name, worked):
    p = worked.new.clone().requires_grad_(True)
    kl = estimate_kl(p, worked.ref, worked.mask, estimator=name, old_logprobs=worked.old)
    (kl.sum() / 6).backward()
    tokens, grad = WORKED[name]
    assert kl[worked.mask].tolist() == pytest.approx(tokens, abs=1e-6)
    assert p.grad[worked.mask].tolist() == pytest.approx(grad, abs=1e-6)
    assert kl[~worked.mask].tolist() == [0.0, 0.0]
    assert p.grad[~worked.mask].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("distance", [-300.0, -25.0, -20.1, -19.9, -10.0, 10.0, 19.9, 20.1, 25.0])
def test_k3_is_pulls_towards_the_reference_at_any_distance(distance):
    new = torch.tensor([[-301.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    ref = new.detach() - distance
    kl = estimate_kl(new, ref, mask, estimator="k3_is", old_logprobs=new.detach())
    (grad,) = torch.autograd.grad(kl.sum(), new)
    assert grad.item() == pytest.approx(distance)
    assert kl.item() == pytest.approx(min(np.expm1(-max(distance, -20)) + min(distance, 20), 10.0))


def test_float32_k3_near_zero_keeps_its_digits_and_far_away_stays_finite():
    new = torch.tensor([[-1.0001, -120.0, -0.1]])
    ref = torch.tensor([[-1.0, -0.1, -120.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    kl = estimate_kl(new, ref, mask, estimator="k3")
    d = (new.double() - ref.double())[0, 0]
    assert kl[0, 0].item() == pytest.approx(float(torch.expm1(-d) + d), rel=2e-2)
    assert torch.isfinite(kl).all()


def test_k3_of_one_token_cannot_own_the_step():
    ref = torch.zeros(1, 4, dtype=torch.float64)
    new = torch.tensor([[-2.0, -11.0, -19.9, -60.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 4, dtype=torch.bool)
    kl = estimate_kl(new, ref, mask, estimator="k3")
    assert kl[0].tolist() == pytest.approx([np.exp(2) - 3, 10.0, 10.0, 10.0])
    (grad,) = torch.autograd.grad(kl.sum(), new)
    assert grad[0].tolist() == pytest.approx([1 - np.exp(2), 0, 0, 0])
    free = estimate_kl(new, ref, mask, estimator="k3_unclamped")
    expected = [np.exp(d) - 1 - d for d in (2, 11, 19.9, 20)]
    assert free[0].tolist() == pytest.approx(expected)
    # The ratio is as small as d is: value and gradient of k3_is stay small without a bound.
    weighted = estimate_kl(new, ref, mask, estimator="k3_is", old_logprobs=ref)
    (grad,) = torch.autograd.grad(weighted.sum(), new)
    assert grad.abs().max() < 1


def test_half_precision_inputs_are_computed_in_float32(ragged):
    batch = ragged(4)
    new, ref = batch.tensors.new.bfloat16(), batch.tensors.ref.bfloat16()
    mask = batch.tensors.mask
    kl = estimate_kl(new, ref, mask, estimator="k1")
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, torch.where(mask, new.float() - ref.float(), 0.0))


def test_missing_old_logprobs_and_unknown_names_are_errors(worked):
    with pytest.raises(ValueError, match="k3_is' needs old_logprobs"):
        estimate_kl(worked.new, worked.ref, worked.mask, estimator="k3_is")
    with pytest.raises(ValueError, match=r"expected one of abs, k1, .*k3_unclamped"):
        estimate_kl(worked.new, worked.ref, worked.mask, estimator="k9")


def test_adaptive_controller_follows_the_target_within_its_clip():
    controller = KlController(coef=0.2, target=6.0, horizon=10000)
    coefs = []
    for kl in (3.0, 6.6, 12.0):
        controller = controller.update(kl, num_samples=256)
        coefs.append(controller.coef)
    assert coefs == pytest.approx([0.198976, 0.199485379, 0.200506744], abs=1e-9)


def test_controllers_refuse_nonsense_and_fixed_stays():
    fixed = KlController(0.1)
    assert fixed.update(99.0, num_samples=5) == fixed
    with pytest.raises(ValueError, match="must be positive"):
        KlController(0.1, target=0.0)
    with pytest.raises(ValueError, match="must be finite"):
        KlController(0.1, target=1.0).update(float("nan"), num_samples=1)
