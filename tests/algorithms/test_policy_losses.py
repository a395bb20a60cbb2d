"""Policy losses: independent float64 versions, identities, derivatives."""

import functools

import numpy as np
import pytest
import torch
from tests.algorithms.paper_losses import PAPER_LOSSES, rows_of

from lightrft.algorithms import policy_loss
from lightrft.algorithms.aggregation import aggregate, local_normalizer
from lightrft.algorithms.interface import PolicyLossTraits, policy_loss_traits
from lightrft.config import ConfigError
from lightrft.config.registry import POLICY_LOSSES, bind, keyword_options


def build_policy_loss(name, options):
    return bind(POLICY_LOSSES.load(name), options, owner=f"policy loss {name!r}")


def _value_and_grad(name, options, mode, new, old, advantages, mask, constant=8):
    p = new.clone().requires_grad_(True)
    result = build_policy_loss(name, options)(p, old, advantages, mask)
    z = local_normalizer(mask, mode, max_response_tokens=constant)
    value = aggregate(result.loss, mask, mode, z)
    value.backward()
    return result, value.item(), p.grad


def test_gspo_token_with_advantages_that_differ_within_a_row(worked):
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


def test_clip_flags_of_ppo_and_the_dual_clip(worked):
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

SELECTION = {
    "clip_cov": {"cov_ratio": 0.3, "cov_low": -1.0},
    "kl_cov": {"cov_ratio": 0.3, "kl_coef": 0.7},
}
NARROW = {"clip_low": 0.2, "clip_high": 0.2}
CASES = [
    *((name, {}) for name in POLICY_LOSSES),
    *SELECTION.items(),
    *(
        (name, {**options, "cov_ratio": ratio})
        for name, options in SELECTION.items()
        for ratio in (0.0, 1e-4, 1.0)
    ),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    ("dr_grpo", {**NARROW, "dual_clip": 1.5}),
    ("gspo", NARROW),
    ("gspo-token", NARROW),
    ("gmpo", {"max_log_ratio": 0.2}),
    ("cpgd", {**NARROW, "drift_coef": 0.5, "drift_cap": 0.1}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("sapo", {"temperature_positive": 2.0, "temperature_negative": 3.0}),
    ("sapo-sequence", {"temperature_positive": 2.0, "temperature_negative": 3.0}),
    ("dro", {"penalty": 0.5}),
    ("ppo-sequence", {"clip_low": 0.5, "clip_high": 0.5}),
    ("clip_cov", {**SELECTION["clip_cov"], **NARROW}),
]


@pytest.mark.parametrize("name, options", CASES)
def test_equals_the_paper_on_random_ragged_rows(name, options, ragged):
    mode = policy_loss_traits(POLICY_LOSSES.load(name)).aggregation
    for seed in range(4):
        batch = ragged(seed)
        rows = np.broadcast_to(batch.row_advantages[:, None], batch.mask.shape)
        advantages = batch.advantages if seed % 2 else rows
        expected = PAPER_LOSSES[name](
            rows_of(batch.new, batch.old, advantages, batch.mask), **options
        )
        mask = batch.tensors.mask
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            new, old, a = (
                torch.tensor(x, dtype=dtype).masked_fill(~mask, np.nan)
                for x in (batch.new, batch.old, np.array(advantages))
            )
            result, value, gradient = _value_and_grad(name, options, mode, new, old, a, mask)
            assert value == pytest.approx(expected, abs=atol)
            for tensor in (result.loss, result.ratio, gradient):
                assert not tensor[~mask].any()
            for flags in (result.is_clipped_low, result.is_clipped_high, result.is_clamped):
                assert not flags[~mask].any()


@pytest.mark.parametrize(
    "name, options",
    [(name, options) for name, options in CASES if name not in ("cispo", "cpgd", "gspo-token")],
)
def test_derivatives_equal_finite_differences(name, options, ragged):
    batch = ragged(21, rows=3, width=4)
    mask, old = batch.tensors.mask, batch.tensors.old
    advantages = batch.tensors.row_advantages[:, None].expand(batch.mask.shape)
    loss = build_policy_loss(name, options)
    new = torch.tensor(batch.new, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda p: aggregate(loss(p, old, advantages, mask).loss, mask, "seq-mean-token-mean", 2.0),
        (new,),
    )


def test_cispo_weighs_the_gradient_of_reinforce_by_its_clipped_ratio(ragged):
    batch = ragged(4).tensors
    new, old, a, mask = batch.new, batch.old, batch.advantages, batch.mask
    options = {"clip_low": 0.2, "clip_high": 0.3}
    _, _, gradient = _value_and_grad("cispo", options, "token-mean", new, old, a, mask)
    expected = torch.where(mask, -(new - old).exp().clamp(0.8, 1.3) * a / mask.sum(), 0.0)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("options", [{}, NARROW])
def test_cpgd_without_drift_follows_the_log_probability_up_to_its_clip(options, ragged):
    batch = ragged(4).tensors
    new, old, a, mask = batch.new, batch.old, batch.advantages, batch.mask
    options = {**options, "drift_coef": 0.0}
    _, _, gradient = _value_and_grad("cpgd", options, "token-mean", new, old, a, mask)
    log_ratio = new - old
    is_free = torch.where(a > 0, log_ratio < np.log(1.2), log_ratio > np.log(0.8))
    torch.testing.assert_close(gradient, torch.where(mask & is_free, -a / mask.sum(), 0.0))


for_every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)


@for_every_loss
def test_defaults_and_options_are_the_papers(name):
    paper = PAPER_LOSSES[name].__kwdefaults__ or {}
    expected = {key: value for key, value in paper.items() if key != "max_response_tokens"}
    options = keyword_options(POLICY_LOSSES.load(name))
    assert {option: parameter.default for option, parameter in options.items()} == expected
    assert list(keyword_options(POLICY_LOSSES.load(name))) == list(expected)


def test_every_loss_declares_the_aggregation_of_its_paper():
    modes = {name: policy_loss_traits(POLICY_LOSSES.load(name)) for name in POLICY_LOSSES}
    by_token = {"dapo", "cispo", "reinforce", "dro", "clip_cov", "kl_cov"}
    assert {n for n, t in modes.items() if t.aggregation == "token-mean"} == by_token
    assert {n for n, t in modes.items() if t.aggregation == "seq-mean-token-sum-norm"} == {
        "dr_grpo"
    }
    by_row = {"gspo", "gspo-token", "gmpo", "ppo-sequence", "sapo-sequence"}
    assert {n for n, t in modes.items() if t.is_sequence_level} == by_row
    assert {n for n, t in modes.items() if t.couples_rows} == {"clip_cov", "kl_cov"}


def test_a_plain_function_is_a_loss_of_tokens_and_a_declared_one_stays_itself():
    def plain(logprobs, old_logprobs, advantages, response_mask, *, scale: float = 1.0):
        raise NotImplementedError

    assert policy_loss_traits(plain) == PolicyLossTraits(aggregation="seq-mean-token-mean")
    declared = policy_loss(aggregation="token-mean")(plain)
    assert declared is plain
    bound = functools.partial(declared, scale=2.0)
    assert policy_loss_traits(bound).aggregation == "token-mean"
    assert list(keyword_options(bound)) == ["scale"]


def test_cpgd_drift_has_the_capped_gradient_of_the_kl_from_old_to_new(worked):
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


@for_every_loss
def test_far_apart_policies_stay_finite_and_are_counted(name):
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
def test_one_token_far_away_counts_in_full_in_the_mean_of_its_row(name):
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


def test_gspo_token_equals_gspo_where_the_ratio_of_the_row_is_held():
    old = torch.zeros(1, 2, dtype=torch.float64)
    mask, wide = torch.ones(1, 2, dtype=torch.bool), {"clip_low": 1e9, "clip_high": 1e9}
    for d in (30.0, -30.0):
        new = torch.tensor([[d, d + 1]], dtype=torch.float64)
        arguments = (wide, "seq-mean-token-mean", new, old, old - 1, mask)
        one, two = (_value_and_grad(name, *arguments) for name in ("gspo", "gspo-token"))
        assert one[0].is_clamped.all()
        assert one[1] == pytest.approx(two[1])
        assert one[2].tolist() == two[2].tolist() == [[0.0, 0.0]]


@for_every_loss
def test_the_loss_has_the_dtype_of_the_logprobs_and_refuses_other_shapes(name, worked):
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


def test_weights_multiply_the_numerator_only(worked):
    result = build_policy_loss("ppo", {})(worked.new, worked.old, worked.advantages, worked.mask)
    keep = torch.tensor([[False, True, False, True], [False] * 4])
    value = aggregate(result.weighted(keep).loss, worked.mask, "token-mean", 6.0)
    assert value.item() == pytest.approx(-0.242275, abs=1e-6)


@pytest.mark.parametrize(
    "name, options, message",
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
def test_hyper_parameters_out_of_range(name, options, message, worked):
    loss = build_policy_loss(name, options)
    with pytest.raises(ValueError, match=message):
        loss(worked.new, worked.old, worked.advantages, worked.mask)


def test_unknown_names_and_options_are_errors_that_name_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown policy loss 'gpso'.*did you mean gspo"):
        build_policy_loss("gpso", {})
    with pytest.raises(ConfigError, match=r"'gmpo' has no option 'clip_low'.*max_log_ratio"):
        build_policy_loss("gmpo", {"clip_low": 0.2})
    with pytest.raises(ConfigError, match="'reinforce' has no option 'clip_low'; it has none"):
        build_policy_loss("reinforce", {"clip_low": 0.2})
