"""Policy losses: worked numbers, independent float64 versions, identities, derivatives."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrft.algorithms import policy_loss
from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.algorithms.interface import PolicyLossTraits, policy_loss_traits
from lightrft.config import ConfigError
from lightrft.config.registry import POLICY_LOSSES, bind, keyword_options

_SPEC = importlib.util.spec_from_file_location(
    "paper_losses", Path(__file__).with_name("paper_losses.py")
)
paper_losses = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(paper_losses)
PAPER_LOSSES = paper_losses.PAPER_LOSSES


def build_policy_loss(name, options):
    return bind(POLICY_LOSSES.load(name), options, owner=f"policy loss {name!r}")


# name, options, aggregation, token losses, loss, gradient (padding omitted)
WORKED = [
    (
        "ppo",
        {},
        "token-mean",
        [-1.2, -0.904837, -1.2, -0.548812, 0.4, 1.660058],
        -0.298932,
        [0, -0.150806, 0, -0.091469, 0, 0.276676],
    ),
    (
        "ppo",
        {"dual_clip": 3.0},
        "token-mean",
        [-1.2, -0.904837, -1.2, -0.548812, 0.4, 1.5],
        -0.325608,
        [0, -0.150806, 0, -0.091469, 0, 0],
    ),
    (
        "dapo",
        {},
        "token-mean",
        [-1.28, -0.904837, -1.28, -0.548812, 0.4, 1.660058],
        -0.325598,
        [0, -0.150806, 0, -0.091469, 0, 0.276676],
    ),
    ("gspo", {}, "seq-mean-token-mean", None, -0.162735, [0, 0, 0, 0, 0.168732, 0.168732]),
    (
        "gspo",
        {"clip_low": 0.2, "clip_high": 0.2},
        "seq-mean-token-mean",
        [-1.051271] * 4 + [0.674929] * 2,
        -0.188171,
        [-0.131409] * 4 + [0.168732] * 2,
    ),
    (
        "gspo-token",
        {"clip_low": 0.2, "clip_high": 0.2},
        "seq-mean-token-mean",
        [-1.051271] * 4 + [0.674929] * 2,
        -0.188171,
        [-0.131409] * 4 + [0.168732] * 2,
    ),
    ("gmpo", {}, "seq-mean-token-mean", None, -0.127044, [-0.125, -0.125, 0, -0.125, 0, 0.186478]),
    (
        "cpgd",
        {"drift_coef": 0.0},
        "seq-mean-token-mean",
        [0.817678, 0.6, 1.817678, 1.3, -0.561572, -0.2],
        0.376527,
        [0, -0.125, 0, -0.125, 0, 0.125],
    ),
    (
        "cpgd",
        {"drift_coef": 0.01},
        "seq-mean-token-mean",
        [0.815229, 0.600571, 1.806169, 1.305865, -0.554804, -0.208],
        0.375278,
        [0.000437, -0.125119, 0.001028, -0.125564, -0.001128, 0.13],
    ),
    (
        "cispo",
        {},
        "token-mean",
        [0.896, 0.542902, 1.792, 0.713455, -0.411609, -0.256],
        0.546125,
        [-0.213333, -0.150806, -0.213333, -0.091469, 0.045734, 0.106667],
    ),
    (
        "cispo",
        {"clip_high": 4.0},
        "token-mean",
        [0.944901, 0.542902, 2.550966, 0.713455, -0.411609, -0.664023],
        0.612765,
        [-0.224976, -0.150806, -0.303686, -0.091469, 0.045734, 0.276676],
    ),
    (
        "cispo",
        {"clip_low": 0.2, "clip_high": 0.2},
        "token-mean",
        [0.84, 0.542902, 1.68, 1.04, -0.6, -0.24],
        0.543817,
        [-0.2, -0.150806, -0.2, -0.133333, 0.066667, 0.1],
    ),
    (
        "sapo",
        {},
        "seq-mean-token-mean",
        [-2.346333, -1.904909, -2.778744, -1.556313, 0.730913, 1.751506],
        -0.452683,
        [-0.163673, -0.112849, -0.193233, -0.065225, 0.064892, 0.12282],
    ),
    (
        "reinforce",
        {},
        "token-mean",
        [0.7, 0.6, 1.4, 1.3, -0.75, -0.2],
        0.508333,
        [-1 / 6] * 4 + [1 / 12] * 2,
    ),
]


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
    [
        ("seq-mean-token-sum", -0.896795),
        ("seq-mean-token-mean", 0.033308),
        ("seq-mean-token-sum-norm", -0.112099),
    ],
)
def test_ppo_under_the_other_aggregations(mode: str, loss: float, worked) -> None:
    _, value, _ = _value_and_grad(
        "ppo", {}, mode, worked.new, worked.old, worked.advantages, worked.mask
    )
    assert value == pytest.approx(loss, abs=1e-6)


def test_gspo_token_with_advantages_that_differ_within_a_row(worked) -> None:
    advantages = torch.tensor([[1.0, 0.5, 1.5, 1.0], [-0.5, -1.0, 0, 0]]).double()
    options = {"clip_low": 0.2, "clip_high": 0.2}
    _, value, grad = _value_and_grad(
        "gspo-token",
        options,
        "seq-mean-token-mean",
        worked.new,
        worked.old,
        advantages,
        worked.mask,
    )
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


# ---- the papers' objectives, aggregation included


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_equals_the_paper_on_random_ragged_rows(name: str, ragged) -> None:
    mode = policy_loss_traits(POLICY_LOSSES.load(name)).aggregation
    for seed in range(4):
        batch = ragged(seed)
        rows = np.broadcast_to(batch.row_advantages[:, None], batch.mask.shape)
        advantages = batch.advantages if seed % 2 else rows
        expected = PAPER_LOSSES[name](batch.new, batch.old, advantages, batch.mask)
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            new, old, a = (
                torch.tensor(x, dtype=dtype) for x in (batch.new, batch.old, np.array(advantages))
            )
            mask = torch.tensor(batch.mask)
            value = _value_and_grad(name, {}, mode, new, old, a, mask)[1]
            assert value == pytest.approx(expected, abs=atol)


def test_there_is_a_paper_for_every_loss() -> None:
    assert set(PAPER_LOSSES) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_defaults_and_options_are_the_papers(name: str) -> None:
    paper = PAPER_LOSSES[name].__kwdefaults__ or {}
    expected = {key: value for key, value in paper.items() if key != "max_response_tokens"}
    options = keyword_options(POLICY_LOSSES.load(name))
    assert {option: parameter.default for option, parameter in options.items()} == expected
    assert list(keyword_options(POLICY_LOSSES.load(name))) == list(expected)


def test_every_loss_declares_the_aggregation_of_its_paper() -> None:
    modes = {name: policy_loss_traits(POLICY_LOSSES.load(name)) for name in POLICY_LOSSES}
    by_token = {"dapo", "cispo", "reinforce", "dro", "clip_cov", "kl_cov"}
    assert {n for n, t in modes.items() if t.aggregation == "token-mean"} == by_token
    assert {n for n, t in modes.items() if t.aggregation == "seq-mean-token-sum-norm"} == {
        "dr_grpo"
    }
    by_row = {"gspo", "gspo-token", "gmpo", "ppo-sequence", "sapo-sequence"}
    assert {n for n, t in modes.items() if t.is_sequence_level} == by_row
    assert {n for n, t in modes.items() if t.couples_rows} == {"clip_cov", "kl_cov"}


def test_a_plain_function_is_a_loss_of_tokens_and_a_declared_one_stays_itself() -> None:
    def plain(logprobs, old_logprobs, advantages, response_mask, *, scale: float = 1.0):
        raise NotImplementedError

    assert policy_loss_traits(plain) == PolicyLossTraits(aggregation="seq-mean-token-mean")
    declared = policy_loss(aggregation="token-mean")(plain)
    assert declared is plain
    bound = functools.partial(declared, scale=2.0)
    assert policy_loss_traits(bound).aggregation == "token-mean"
    assert list(keyword_options(bound)) == ["scale"]


SURROGATES = [
    "clipped",
    "ppo",
    "dapo",
    "dr_grpo",
    "gspo",
    "gspo-token",
    "gmpo",
    "cpgd",
    "sapo",
    "dro",
    "ppo-sequence",
    "sapo-sequence",
    "clip_cov",
    "kl_cov",
]
SELECTION = {
    "clip_cov": {"cov_ratio": 0.3, "cov_low": -1.0},
    "kl_cov": {"cov_ratio": 0.3, "kl_coef": 0.7},
}


@pytest.mark.parametrize("name", SURROGATES)
def test_derivatives_equal_finite_differences(name: str, ragged) -> None:
    batch = ragged(21, rows=3, width=4)
    # The drift term is detached by design.
    options = {"drift_coef": 0.0} if name == "cpgd" else SELECTION.get(name, {})
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
    options = {"cov_ratio": 0.0} if name == "clip_cov" else {}  # it leaves tokens out at once
    _, _, grad = _value_and_grad(name, options, mode, new, new, rows, mask)
    # The product of a row's ratios has the derivative of each, not of their mean.
    own = "seq-mean-token-sum" if name == "ppo-sequence" else mode
    _, _, expected = _value_and_grad("reinforce", {}, own, new, new, rows, mask)
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
        "cpgd",
        {"drift_coef": 1.0},
        "seq-mean-token-mean",
        worked.new,
        worked.old,
        zero,
        worked.mask,
    )
    assert value == pytest.approx(-0.124832, abs=1e-6)
    expected = [0.043732, -0.011895, 0.102765, -0.056399, -0.112797, 0.5]
    assert grad[worked.mask].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_row_changes_nothing_and_nothing_else_has_a_gradient(name: str, worked) -> None:
    mode = policy_loss_traits(POLICY_LOSSES.load(name)).aggregation
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
        # Sequence-level losses hold the mean or sum of a row; GMPO bounds one side before.
        held = dict.fromkeys(("gspo", "gspo-token", "ppo-sequence", "sapo-sequence"), [False] * 3)
        held["gmpo"] = [True] * 3
        assert result.is_clamped.tolist() == [held.get(name, [True, True, False])]


@pytest.mark.parametrize("name", ["gspo", "gspo-token", "gmpo"])
def test_one_token_far_away_counts_in_full_in_the_mean_of_its_row(name: str) -> None:
    """The log ratios 25 and -20 have the mean 2.5; held within 20 each they would have 0."""
    old = torch.zeros(1, 2, dtype=torch.float64)
    new = torch.tensor([[25.0, -20.0]], dtype=torch.float64)
    wide = {"max_log_ratio": 1e6} if name == "gmpo" else {"clip_low": 1e6, "clip_high": 1e6}
    for sign in (1.0, -1.0):
        advantages, mask = torch.full_like(old, sign), torch.ones(1, 2, dtype=torch.bool)
        result, _, grad = _value_and_grad(
            name, wide, "seq-mean-token-mean", new, old, advantages, mask
        )
        assert result.ratio.tolist()[0] == pytest.approx([np.exp(2.5)] * 2)
        assert not result.is_clamped.any()
        assert grad.tolist()[0] == pytest.approx([-sign * np.exp(2.5) / 2] * 2)


def test_gspo_token_equals_gspo_where_the_ratio_of_the_row_is_held() -> None:
    old = torch.zeros(1, 2, dtype=torch.float64)
    mask, wide = torch.ones(1, 2, dtype=torch.bool), {"clip_low": 1e9, "clip_high": 1e9}
    for d in (30.0, -30.0):
        new = torch.tensor([[d, d + 1]], dtype=torch.float64)
        arguments = (wide, "seq-mean-token-mean", new, old, old - 1, mask)
        one, two = (_value_and_grad(name, *arguments) for name in ("gspo", "gspo-token"))
        assert one[0].is_clamped.all()
        assert one[1] == pytest.approx(two[1])
        assert one[2].tolist() == two[2].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_loss_has_the_dtype_of_the_logprobs_and_refuses_other_shapes(name: str, worked) -> None:
    loss, mask = build_policy_loss(name, {}), worked.mask
    new, old, advantages = (x.float() for x in (worked.new, worked.old, worked.advantages))
    for mixed in ((new, old.double(), advantages), (new, old, advantages.double())):
        result = loss(*mixed, mask)
        assert result.loss.dtype == result.ratio.dtype == torch.float32
    square = torch.ones(2, 2, dtype=torch.bool)
    one = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"one number per token.*got \(2,\)"):
        loss(one, one, torch.ones(2), square)  # would be broadcast over the tokens
    with pytest.raises(ValueError, match="one number per token"):
        loss(one, one[:1], one, square)


def test_sapo_in_float64_does_not_round_its_temperature() -> None:
    new, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    result = build_policy_loss("sapo", {})(new, new, torch.tensor([[-1.0, 1.0]]).double(), mask)
    assert result.loss[0].tolist() == pytest.approx([2 / 1.05, -2.0], abs=1e-15)


COVARIANCE = [  # of the worked example
    (
        "kl_cov",
        {"cov_ratio": 0.34},
        -0.33186,
        [-0.224976, -0.317473, -0.303686, -0.091469, -0.120932, 0.276676],
    ),
    (
        "clip_cov",
        {"cov_ratio": 1.0, "cov_low": 0.1, "clip_low": 0.2, "clip_high": 0.2},
        -0.148126,
        [0, 0, 0, -0.091469, 0, 0.276676],
    ),
]


@pytest.mark.parametrize(("name", "options", "loss", "grad"), COVARIANCE)
def test_covariance_losses_worked_numbers(name: str, options, loss: float, grad, worked) -> None:
    _, value, gradient = _value_and_grad(
        name, options, "token-mean", worked.new, worked.old, worked.advantages, worked.mask
    )
    assert value == pytest.approx(loss, abs=1e-6)
    assert gradient[worked.mask].tolist() == pytest.approx(grad, abs=1e-6)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("cov_ratio", [0.0, 1e-4, 0.1, 0.3, 0.5, 1.0])
def test_covariance_losses_select_as_the_paper_does(name: str, cov_ratio: float, ragged) -> None:
    for seed in range(6):
        batch = ragged(seed, rows=7, width=12)
        options = {**SELECTION[name], "cov_ratio": cov_ratio}
        arrays = (batch.new, batch.old, batch.advantages, batch.mask)
        tensors = [torch.tensor(array) for array in arrays]
        value = _value_and_grad(name, options, "token-mean", *tensors)[1]
        assert value == pytest.approx(PAPER_LOSSES[name](*arrays, **options), abs=1e-12)
        assert value == _value_and_grad(name, options, "token-mean", *tensors)[1]


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
        ("clip_cov", {"cov_low": 6.0}, "cov_low must be below cov_high"),
        ("clip_cov", {"cov_ratio": 1.5}, "must lie in"),
        ("kl_cov", {"kl_coef": -1.0}, "must not be negative"),
    ],
)
def test_hyper_parameters_out_of_range(name: str, options, message: str, worked) -> None:
    loss = build_policy_loss(name, options)
    with pytest.raises(ValueError, match=message):
        loss(worked.new, worked.old, worked.advantages, worked.mask)


def test_unknown_names_and_options_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy loss 'gpso'.*did you mean gspo"):
        build_policy_loss("gpso", {})
    with pytest.raises(ConfigError, match=r"'gmpo' has no option 'clip_low'.*max_log_ratio"):
        build_policy_loss("gmpo", {"clip_low": 0.2})
    with pytest.raises(ConfigError, match="'reinforce' has no option 'clip_low'; it has none"):
        build_policy_loss("reinforce", {"clip_low": 0.2})
