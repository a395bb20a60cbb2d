"""Policy losses: worked numbers, independent float64 versions, identities, derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightrft.algorithms import (
    POLICY_LOSSES,
    aggregate,
    build_policy_loss,
    get_policy_loss,
    local_normalizer,
)

# name, options, aggregation, token losses, loss, gradient (padding omitted)
WORKED = [
    ("ppo", {}, "token-mean",
     [-1.2, -0.904837, -1.2, -0.548812, 0.4, 1.660058], -0.298932,
     [0, -0.150806, 0, -0.091469, 0, 0.276676]),
    ("ppo", {"dual_clip": 3.0}, "token-mean",
     [-1.2, -0.904837, -1.2, -0.548812, 0.4, 1.5], -0.325608,
     [0, -0.150806, 0, -0.091469, 0, 0]),
    ("dapo", {}, "token-mean",
     [-1.28, -0.904837, -1.28, -0.548812, 0.4, 1.660058], -0.325598,
     [0, -0.150806, 0, -0.091469, 0, 0.276676]),
    ("gspo", {}, "seq-mean-token-mean", None, -0.162735, [0, 0, 0, 0, 0.168732, 0.168732]),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, "seq-mean-token-mean",
     [-1.051271] * 4 + [0.674929] * 2, -0.188171, [-0.131409] * 4 + [0.168732] * 2),
    ("gspo-token", {"clip_low": 0.2, "clip_high": 0.2}, "seq-mean-token-mean",
     [-1.051271] * 4 + [0.674929] * 2, -0.188171, [-0.131409] * 4 + [0.168732] * 2),
    ("gmpo", {}, "seq-mean-token-mean", None, -0.127044,
     [-0.125, -0.125, 0, -0.125, 0, 0.186478]),
    ("cpgd", {"drift_coef": 0.0}, "seq-mean-token-mean",
     [0.817678, 0.6, 1.817678, 1.3, -0.561572, -0.2], 0.376527, [0, -0.125, 0, -0.125, 0, 0.125]),
    ("cpgd", {"drift_coef": 0.01}, "seq-mean-token-mean",
     [0.815229, 0.600571, 1.806169, 1.305865, -0.554804, -0.208], 0.375278,
     [0.000437, -0.125119, 0.001028, -0.125564, -0.001128, 0.13]),
    ("cispo", {}, "token-mean",
     [0.896, 0.542902, 1.792, 0.713455, -0.411609, -0.256], 0.546125,
     [-0.213333, -0.150806, -0.213333, -0.091469, 0.045734, 0.106667]),
    ("cispo", {"clip_high": 4.0}, "token-mean",
     [0.944901, 0.542902, 2.550966, 0.713455, -0.411609, -0.664023], 0.612765,
     [-0.224976, -0.150806, -0.303686, -0.091469, 0.045734, 0.276676]),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, "token-mean",
     [0.84, 0.542902, 1.68, 1.04, -0.6, -0.24], 0.543817,
     [-0.2, -0.150806, -0.2, -0.133333, 0.066667, 0.1]),
    ("sapo", {}, "seq-mean-token-mean",
     [-2.346333, -1.904909, -2.778744, -1.556313, 0.730913, 1.751506], -0.452683,
     [-0.163673, -0.112849, -0.193233, -0.065225, 0.064892, 0.12282]),
    ("reinforce", {}, "token-mean",
     [0.7, 0.6, 1.4, 1.3, -0.75, -0.2], 0.508333, [-1 / 6] * 4 + [1 / 12] * 2),
]  # fmt: skip


def _value_and_grad(name, options, mode, new, old, advantages, mask, constant=8):
    p = new.clone().requires_grad_(True)
    result = build_policy_loss(name, options)(p, old, advantages, mask)
    z = local_normalizer(mask, mode, max_response_tokens=constant)
    value = aggregate(result.loss, mask, mode, z)
    value.backward()
    return result, value.item(), p.grad


@pytest.mark.parametrize("case", WORKED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_worked_numbers_with_nan_in_the_padding(case, worked) -> None:
    name, options, mode, tokens, loss, grad = case
    result, value, gradient = _value_and_grad(
        name, options, mode, worked.new, worked.old, worked.advantages, worked.mask
    )
    if tokens is not None:
        assert result.loss[worked.mask].tolist() == pytest.approx(tokens, abs=1e-6)
    assert value == pytest.approx(loss, abs=1e-6)
    assert gradient[worked.mask].tolist() == pytest.approx(grad, abs=1e-6)
    for tensor in (result.loss, result.ratio, gradient):
        assert torch.equal(tensor[~worked.mask], torch.zeros(2, dtype=torch.float64))
    for flags in (result.is_clipped_low, result.is_clipped_high, result.is_clamped):
        assert not flags[~worked.mask].any()


@pytest.mark.parametrize(
    ("mode", "loss"),
    [("seq-mean-token-sum", -0.896795), ("seq-mean-token-mean", 0.033308),
     ("seq-mean-token-sum-norm", -0.112099)],
)  # fmt: skip
def test_ppo_under_the_other_aggregations(mode: str, loss: float, worked) -> None:
    _, value, _ = _value_and_grad(
        "ppo", {}, mode, worked.new, worked.old, worked.advantages, worked.mask
    )
    assert value == pytest.approx(loss, abs=1e-6)


def test_gspo_token_with_advantages_that_differ_within_a_row(worked) -> None:
    advantages = torch.tensor([[1.0, 0.5, 1.5, 1.0], [-0.5, -1.0, 0, 0]]).double()
    options = {"clip_low": 0.2, "clip_high": 0.2}
    _, value, grad = _value_and_grad(
        "gspo-token", options, "seq-mean-token-mean", worked.new, worked.old, advantages,
        worked.mask,
    )  # fmt: skip
    assert value == pytest.approx(-0.019438, abs=1e-6)
    expected = [-0.131409, -0.065704, -0.197113, -0.131409, 0.168732, 0.337465]
    assert grad[worked.mask].tolist() == pytest.approx(expected, abs=1e-6)


def test_clip_flags_of_ppo_and_the_dual_clip(worked) -> None:
    ppo = build_policy_loss("ppo", {})(worked.new, worked.old, worked.advantages, worked.mask)
    assert ppo.is_clipped_high[worked.mask].tolist() == [True, False, True, False, False, False]
    assert ppo.is_clipped_low[worked.mask].tolist() == [False] * 4 + [True, False]
    assert ppo.ratio[worked.mask].tolist() == pytest.approx(
        [1.349859, 0.904837, 1.822119, 0.548812, 0.548812, 3.320117], abs=1e-6
    )
    dual = build_policy_loss("ppo", {"dual_clip": 3.0})(
        worked.new, worked.old, worked.advantages, worked.mask
    )
    assert dual.is_clipped_high[1, 1]


# ---- independent float64 versions, one token or row at a time


def _clip(x, low, high):
    return min(max(x, low), high)


def _mean_over_row(batch, i, f):
    tokens = [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]]
    return sum(f(t) for t in tokens) / len(tokens)


def _reference(name, batch, i, t):
    d = lambda s: batch.new[i, s] - batch.old[i, s]  # noqa: E731
    a, r = batch.row_advantages[i], math.exp(d(t))
    if name in ("ppo", "clipped", "dr_grpo"):
        return -min(r * a, _clip(r, 0.8, 1.2) * a)
    if name == "dapo":
        return -min(r * a, _clip(r, 0.8, 1.28) * a)
    if name in ("gspo", "gspo-token"):
        s = math.exp(_mean_over_row(batch, i, d))
        return -min(s * a, _clip(s, 1 - 3e-4, 1 + 4e-4) * a)
    if name == "gmpo":
        bounded = (lambda s: min(d(s), 0.4)) if a > 0 else (lambda s: max(d(s), -0.4))
        return -math.exp(_mean_over_row(batch, i, bounded)) * a
    if name == "cpgd":
        p, q = batch.new[i, t], batch.old[i, t]
        c = min(p, q + math.log(1.2)) if a > 0 else max(p, q + math.log(0.8))
        return -c * a + 0.001 * min(r - 1, 2.0) * p
    if name == "cispo":
        return -_clip(r, 0.0, 1.28) * a * batch.new[i, t]
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
    assert name == "reinforce"
    return -a * batch.new[i, t]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_equals_a_slow_version_on_random_ragged_rows(name: str, ragged) -> None:
    for seed in range(4):
        batch = ragged(seed)
        advantages = torch.tensor(batch.row_advantages)[:, None].expand(batch.mask.shape)
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            result = build_policy_loss(name, {})(
                torch.tensor(batch.new, dtype=dtype),
                torch.tensor(batch.old, dtype=dtype),
                advantages.to(dtype),
                torch.tensor(batch.mask),
            )
            expected = np.zeros_like(batch.new)
            for i, t in zip(*np.nonzero(batch.mask), strict=True):
                expected[i, t] = _reference(name, batch, i, t)
            np.testing.assert_allclose(result.loss.double().numpy(), expected, atol=atol)


SURROGATES = ["clipped", "ppo", "dapo", "dr_grpo", "gspo", "gspo-token", "gmpo", "cpgd", "sapo"]


@pytest.mark.parametrize("name", SURROGATES)
def test_derivatives_equal_finite_differences(name: str, ragged) -> None:
    batch = ragged(21, rows=3, width=4)
    options = {"drift_coef": 0.0} if name == "cpgd" else {}  # the drift term is detached by design
    if name == "gspo-token":
        options = {"clip_low": 10.0, "clip_high": 10.0}
    mask, old = torch.tensor(batch.mask), torch.tensor(batch.old)
    advantages = torch.tensor(batch.row_advantages)[:, None].expand(batch.mask.shape)
    loss = build_policy_loss("gspo" if name == "gspo-token" else name, options)
    new = torch.tensor(batch.new, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda p: aggregate(loss(p, old, advantages, mask).loss, mask, "seq-mean-token-mean", 2.0),
        (new,),
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_first_update_has_the_reinforce_gradient(name: str, ragged) -> None:
    batch = ragged(3)
    mask, new = torch.tensor(batch.mask), torch.tensor(batch.new)
    rows = torch.tensor(batch.row_advantages)[:, None].expand(batch.mask.shape)
    mode = "seq-mean-token-mean"
    _, _, grad = _value_and_grad(name, {}, mode, new, new, rows, mask)
    _, _, expected = _value_and_grad("reinforce", {}, mode, new, new, rows, mask)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(grad, expected, atol=1e-12, rtol=0)


def test_gspo_token_equals_gspo_where_the_advantage_is_constant(ragged) -> None:
    batch = ragged(5)
    mask, new, old = (torch.tensor(x) for x in (batch.mask, batch.new, batch.old))
    rows = torch.tensor(batch.row_advantages)[:, None].expand(batch.mask.shape)
    options = {"clip_low": 0.05, "clip_high": 0.05}
    one = _value_and_grad("gspo", options, "seq-mean-token-mean", new, old, rows, mask)
    two = _value_and_grad("gspo-token", options, "seq-mean-token-mean", new, old, rows, mask)
    assert one[1] == pytest.approx(two[1], abs=1e-12)
    torch.testing.assert_close(one[2], two[2], atol=1e-12, rtol=0)


def test_gmpo_without_bound_equals_gspo_without_clip(ragged) -> None:
    batch = ragged(6)
    mask, new, old = (torch.tensor(x) for x in (batch.mask, batch.new, batch.old))
    rows = torch.tensor(batch.row_advantages)[:, None].expand(batch.mask.shape)
    mode = "seq-mean-token-mean"
    gmpo = _value_and_grad("gmpo", {"max_log_ratio": 1e6}, mode, new, old, rows, mask)
    gspo = _value_and_grad("gspo", {"clip_low": 1e6, "clip_high": 1e6}, mode, new, old, rows, mask)
    assert gmpo[1] == pytest.approx(gspo[1], abs=1e-12)
    torch.testing.assert_close(gmpo[2], gspo[2], atol=1e-12, rtol=0)


def test_cpgd_drift_has_the_capped_gradient_of_the_kl_from_old_to_new(worked) -> None:
    zero = torch.zeros_like(worked.advantages)
    _, value, grad = _value_and_grad(
        "cpgd", {"drift_coef": 1.0}, "seq-mean-token-mean", worked.new, worked.old, zero,
        worked.mask,
    )  # fmt: skip
    assert value == pytest.approx(-0.124832, abs=1e-6)
    expected = [0.043732, -0.011895, 0.102765, -0.056399, -0.112797, 0.5]
    assert grad[worked.mask].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_row_changes_nothing_and_nothing_else_has_a_gradient(name: str, worked) -> None:
    mode = get_policy_loss(name).aggregation
    old = worked.old.clone().requires_grad_(True)
    advantages = worked.advantages.clone().requires_grad_(True)
    _, value, grad = _value_and_grad(name, {}, mode, worked.new, old, advantages, worked.mask)
    assert old.grad is None
    assert advantages.grad is None
    pad = lambda x: torch.cat([x, torch.full((1, 4), 9.0).to(x.dtype)])  # noqa: E731
    mask = torch.cat([worked.mask, torch.zeros(1, 4, dtype=torch.bool)])
    _, longer, longer_grad = _value_and_grad(
        name, {}, mode, pad(worked.new), pad(worked.old), pad(worked.advantages), mask
    )
    assert longer == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(longer_grad[:2], grad)
    assert torch.equal(longer_grad[2], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_far_apart_policies_stay_finite_and_are_counted(name: str) -> None:
    new = torch.tensor([[-500.0, -0.1, -0.2]], requires_grad=True)
    old = torch.tensor([[-0.1, -500.0, -0.2]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for sign in (1.0, -1.0):
        result = build_policy_loss(name, {})(new, old, torch.full((1, 3), sign), mask)
        (grad,) = torch.autograd.grad(result.loss.sum(), new)
        assert torch.isfinite(result.loss).all()
        assert torch.isfinite(grad).all()
        assert result.is_clamped.tolist() == [[True, True, False]]


def test_weights_multiply_the_numerator_only(worked) -> None:
    result = build_policy_loss("ppo", {})(worked.new, worked.old, worked.advantages, worked.mask)
    keep = torch.tensor([[False, True, False, True], [False] * 4])
    value = aggregate(result.weighted(keep).loss, worked.mask, "token-mean", 6.0)
    assert value.item() == pytest.approx(-0.242275, abs=1e-6)


def test_decoupled_ppo_with_a_truncated_weight(worked) -> None:
    p = worked.new.clone().requires_grad_(True)
    ppo = build_policy_loss("ppo", {})(p, worked.old, worked.advantages, worked.mask)
    weights = torch.where(worked.mask, (worked.old - worked.rollout).exp().clamp(max=2.0), 0.0)
    loss = aggregate(ppo.weighted(weights).loss, worked.mask, "token-mean", 6.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.078445, abs=1e-6)
    expected = [0, -0.150806, 0, -0.096158, 0, 0.553353]
    assert p.grad[worked.mask].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"clip_low": -0.1}, "must not be negative"),
        ("ppo", {"dual_clip": 1.1}, "must exceed 1 \\+ clip_high"),
        ("gspo", {"clip_high": -1.0}, "must not be negative"),
        ("gmpo", {"max_log_ratio": 0.0}, "must be positive"),
        ("cpgd", {"clip_low": 1.0}, "0 <= clip_low < 1"),
        ("cispo", {"clip_low": -1.0}, "must not be negative"),
        ("sapo", {"temperature_negative": 0.0}, "must be positive"),
    ],
)
def test_hyper_parameters_out_of_range(name: str, options, message: str, worked) -> None:
    loss = build_policy_loss(name, options)
    with pytest.raises(ValueError, match=message):
        loss(worked.new, worked.old, worked.advantages, worked.mask)


def test_unknown_names_and_options_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        build_policy_loss("gpso", {})
    with pytest.raises(ValueError, match=r"'gmpo' has no option 'clip_low'.*max_log_ratio"):
        build_policy_loss("gmpo", {"clip_low": 0.2})
    build_policy_loss("gmpo", {"clip_low": None})  # not given
    with pytest.raises(ValueError, match="its options are none"):
        build_policy_loss("reinforce", {"clip_low": 0.2})
