"""Advantage estimators: loops over groups, properties of groups, whitening once over all ranks."""

import numpy as np
import pytest
import torch

from lightrft.algorithms import RowAdvantageInputs, TokenAdvantageInputs, advantage_estimator
from lightrft.algorithms.advantages.row_level import estimate_row_advantages
from lightrft.algorithms.advantages.token_level import (
    broadcast_to_tokens,
    estimate_token_advantages,
)
from lightrft.algorithms.interface import advantage_traits
from lightrft.algorithms.moments import Moments, masked_moments, moments_of, whiten
from lightrft.config.registry import ADVANTAGE_ESTIMATORS, bind


def build_advantage_estimator(name, options):
    return bind(ADVANTAGE_ESTIMATORS.load(name), options, owner=f"advantage estimator {name!r}")


ONE_TOKEN = TokenAdvantageInputs(torch.ones(1, 1), torch.ones(1, 1).bool())
REWARDS = [1.0, 0.0, 0.5, 1.0]
TRAITS = {
    name: advantage_traits(build_advantage_estimator(name, {})) for name in ADVANTAGE_ESTIMATORS
}
GROUP_ESTIMATORS = [name for name, traits in TRAITS.items() if traits.needs_groups]


def _inputs(rewards, groups=None, lengths=None, **more):
    n = len(rewards)
    return RowAdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([0] * n if groups is None else groups),
        lengths=torch.tensor([1] * n if lengths is None else lengths),
        **more,
    )


def _estimate(name, inputs, options=None):
    return estimate_row_advantages(build_advantage_estimator(name, options or {}), inputs)


# Estimator, its options, and the advantage of one row whose group has rewards that differ: of its
# reward, the rewards and lengths of its group, those of all groups, and how many groups there are
# for each that has a signal.
EPS = 1e-6
STANDARD = lambda r, own, *_: (r - own.mean()) / (own.std(ddof=1) + EPS)  # noqa: E731
CENTRED = lambda r, own, *_: r - own.mean()  # noqa: E731
BY_ROW = [
    ("grpo", {}, STANDARD),
    ("group_norm", {}, STANDARD),
    ("cpgd", {}, STANDARD),
    ("group_norm", {"eps": 0.1}, lambda r, own, *_: (r - own.mean()) / (own.std(ddof=1) + 0.1)),
    ("dr_grpo", {}, CENTRED),
    ("reinforce_baseline", {}, CENTRED),
    ("cpgd", {"weighting": "centre"}, CENTRED),
    ("rloo", {}, lambda r, own, *_: (r - own.mean()) * len(own) / (len(own) - 1)),
    ("opo", {}, lambda r, own, lengths, *_: r - (own * lengths).sum() / lengths.sum()),
    (
        "group_mean_batch_std",
        {"eps": 0.1},
        lambda r, own, _, every, *__: (r - own.mean()) / (every.std(ddof=1) + 0.1),
    ),
    (
        "batch_mean_group_std",
        {},
        lambda r, own, _, every, *__: (r - every.mean()) / (own.std(ddof=1) + EPS),
    ),
    ("maxrl", {}, lambda r, own, *_: (r - own.mean()) / (own.mean() + EPS)),
    (
        "pass_at_k",
        {},
        lambda r, own, *_: (
            (r - sorted(own)[-2]) / (own.std(ddof=1) + EPS) if r == max(own) else 0.0
        ),
    ),
    ("gpg", {}, lambda r, own, _, __, share: (r - own.mean()) * share),
    ("cpgd", {"weighting": "clip_filter"}, lambda r, own, _, __, share: (r - own.mean()) * share),
    ("zero", {}, lambda *_: 0.0),
]


@pytest.mark.parametrize("name, options, of_row", BY_ROW)
def test_advantages_of_rows_equal_a_loop_over_groups(name, options, of_row):
    """Groups are interleaved; group 3 is constant, group 4 has one score, some rows have none."""
    rng = np.random.default_rng(5)
    groups = rng.permutation(np.repeat([7, 3, 90, -2, 5, 11], 4))
    rewards, scored, lengths = (
        rng.random(24).round(2),
        rng.random(24) > 0.15,
        rng.integers(1, 9, 24),
    )
    rewards[groups == 3] = 0.5
    scored[np.flatnonzero(groups == 11)[1:]] = False
    # What a row without a score holds moves no baseline.
    rewards[~scored] = rng.choice([np.nan, 1e9, -1e9], (~scored).sum())
    own_rows = [np.flatnonzero((groups == group) & scored) for group in groups]
    has_signal = [len(set(rewards[own])) > 1 for own in own_rows]
    share = 6 / len({group for group, flag in zip(groups, has_signal, strict=True) if flag})
    every = rewards[scored]
    expected = [
        of_row(rewards[i], rewards[own], lengths[own], every, share)
        if scored[i] and has_signal[i]
        else 0.0
        for i, own in enumerate(own_rows)
    ]
    inputs = _inputs(rewards, groups, lengths, is_scored=torch.tensor(scored))
    assert _estimate(name, inputs, options).tolist() == pytest.approx(expected, abs=1e-12)


def test_every_registered_estimator_is_covered_here():
    covered = {name for name, _, _ in BY_ROW} | {"raft", "gdpo", "remax"}
    assert covered | {"gae", "reinforce", "reinforce++"} == set(ADVANTAGE_ESTIMATORS)


def test_maxrl_needs_rewards_that_are_not_negative():
    with pytest.raises(ValueError, match="maxrl estimator needs rewards of at least 0"):
        _estimate("maxrl", _inputs([1.0, -0.5]))


def test_remax_subtracts_the_greedy_reward():
    inputs = _inputs(REWARDS, groups=[0, 1, 2, 3], greedy_rewards=torch.full((4,), 0.5).double())
    assert _estimate("remax", inputs).tolist() == [0.5, -0.5, 0.0, 0.5]
    with pytest.raises(ValueError, match="needs greedy_rewards"):
        _estimate("remax", _inputs(REWARDS))


def test_raft_weighs_the_best_row_of_each_prompt_as_if_its_tokens_were_all():
    """So a mean over the tokens of all rows is one over those of the best rows."""
    rng = np.random.default_rng(7)
    lengths, groups = rng.integers(1, 12, 24), rng.permutation(np.repeat(np.arange(6), 4))
    rewards, scored = rng.integers(0, 4, 24).astype(float), rng.random(24) > 0.2
    rewards[groups == 2] = 1.0
    best = []
    for group in range(6):
        own = [i for i in range(24) if groups[i] == group and scored[i]]
        if len({rewards[i] for i in own}) > 1:
            best.append(max(own, key=lambda i: (rewards[i], -i)))
    assert 0 < len(best) < 6
    expected = np.zeros(24)
    expected[best] = lengths[scored].sum() / lengths[best].sum()
    inputs = _inputs(rewards, groups, lengths, is_scored=torch.tensor(scored))
    assert _estimate("raft", inputs).tolist() == pytest.approx(expected, rel=1e-12)
    assert _estimate("raft", _inputs([1.0, 1.0])).tolist() == [0.0, 0.0]


def test_gdpo_equals_a_loop_over_components_and_groups():
    rng = np.random.default_rng(6)
    groups = rng.permutation(np.repeat(np.arange(5), 4))
    scored = rng.random(20) > 0.15
    parts = {"a": rng.integers(0, 2, 20) * 1.0, "b": rng.normal(size=20), "c": rng.random(20)}
    parts["b"][rng.random(20) < 0.2] = np.nan
    total = np.zeros(20)
    for i in range(20):
        for name, weight in (("a", 1.0), ("b", 0.25)):
            has = (groups == groups[i]) & scored & np.isfinite(parts[name])
            own = parts[name][has]
            if has[i] and np.ptp(own) > 0:
                std = own.std(ddof=1) + 1e-6
                total[i] += weight * (parts[name][i] - own.mean()) / std
    inputs = _inputs(
        rng.normal(size=20).tolist(),
        groups=groups.tolist(),
        is_scored=torch.tensor(scored.tolist()),
        components={name: torch.tensor(values) for name, values in parts.items()},
    )
    found = _estimate("gdpo", inputs, {"components": "a, b=0.25"})
    expected = total / (total[scored].std(ddof=1) + 1e-6)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    with pytest.raises(ValueError, match=r"no component 'd': .* must be of a, b, c"):
        _estimate("gdpo", inputs, {"components": "a,d"})


def test_clip_filter_makes_up_for_constant_groups_up_to_three():
    many = _inputs([*REWARDS, *[1.0] * 12], groups=[0] * 4 + [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6])
    assert _estimate("gpg", many)[:4].tolist() == pytest.approx([7 * (x - 0.625) for x in REWARDS])
    capped = _estimate("cpgd", many, {"weighting": "clip_filter"})
    assert capped.tolist() == _estimate("gpg", many, {"max_weight": 3.0}).tolist()
    assert capped[:4].tolist() == pytest.approx([3 * x for x in (0.375, -0.625, -0.125, 0.375)])


for_every_group_estimator = pytest.mark.parametrize("name", GROUP_ESTIMATORS)


@for_every_group_estimator
@pytest.mark.parametrize("reward", [0.7, 0.1, 1e6 + 0.1])
def test_a_constant_group_gets_exactly_zero_in_float32(name, reward):
    for n in (2, 3, 5, 7, 8, 16):
        inputs = RowAdvantageInputs(
            torch.full((n,), reward), torch.zeros(n, dtype=torch.long), torch.arange(1, n + 1)
        )
        assert _estimate(name, inputs).tolist() == [0.0] * n


@for_every_group_estimator
def test_rewards_that_differ_by_rounding_alone_are_equal(name):
    assert _estimate(name, _inputs([0.1 + 0.2, 0.3, 0.3, 0.3])).tolist() == [0.0] * 4
    assert _estimate(name, _inputs([0.0, 0.1 + 0.2 - 0.3, 0.0, 0.0])).tolist() == [0.0] * 4


def test_small_differences_of_large_rewards_count():
    near, far = (_estimate("group_norm", _inputs([x, x + 1, x + 2, x + 3])) for x in (0.0, 1e12))
    torch.testing.assert_close(near, far)


@for_every_group_estimator
def test_one_completion_per_prompt_is_an_error(name):
    with pytest.raises(ValueError, match=r"group 4 has a single completion.*at least 2"):
        _estimate(name, _inputs([1.0, 0.0, 1.0], groups=[1, 1, 4]))


def test_a_reward_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="rewards must be finite: row 1 has nan"):
        _estimate("rloo", _inputs([1.0, float("nan")]))
    greedy = torch.zeros(2).double()
    with pytest.raises(ValueError, match="rewards must be finite: row 0 has inf"):
        _estimate("remax", _inputs([float("inf"), 1.0], greedy_rewards=greedy))
    with pytest.raises(ValueError, match="greedy_rewards must be finite: row 1 has nan"):
        _estimate("remax", _inputs([1.0, 1.0], greedy_rewards=torch.tensor([0, torch.nan])))
    unscored = torch.tensor([True, False])
    inputs = _inputs([1.0, float("nan")], greedy_rewards=greedy, is_scored=unscored)
    assert _estimate("remax", inputs).tolist() == [1.0, 0.0]


# ---- token-level estimators and whitening


def test_whitening_does_not_depend_on_the_split_over_ranks(ragged):
    batch = ragged(3, rows=6)
    values, mask = batch.tensors.advantages.float(), batch.tensors.mask
    whole = masked_moments(values, mask)
    merged = Moments()
    for i in (0, 2, 4):
        merged = merged.merge(masked_moments(values[i : i + 2], mask[i : i + 2]))
    expected = whiten(values, mask, whole)
    kept = values[mask].double().numpy()
    for ddof in (0, 1):
        white = whiten(values, mask, whole, ddof=ddof)
        np.testing.assert_allclose(
            white[mask], (kept - kept.mean()) / kept.std(ddof=ddof), atol=1e-6
        )
        assert not white[~mask].any()
    torch.testing.assert_close(whiten(values, mask, merged), expected)
    local = masked_moments(values[:2], mask[:2])
    other = whiten(values[:2], mask[:2], local)
    assert (other - expected[:2]).abs().max() > 0.01  # local moments would be seen


def test_whitening_a_constant_or_a_single_token_is_finite():
    mask = torch.tensor([[True, True, False]])
    constant = torch.tensor([[0.7, 0.7, float("nan")]])
    moments = masked_moments(constant, mask)
    white = whiten(constant, mask, moments)
    torch.testing.assert_close(white, torch.zeros(1, 3), atol=1e-6, rtol=0)
    one = masked_moments(constant, torch.tensor([[True, False, False]]))
    assert one.std(ddof=1) == 1.0
    none = masked_moments(constant, torch.zeros(1, 3, dtype=torch.bool))
    assert (none.mean, none.std(ddof=0)) == (0.0, 1.0)


@pytest.mark.parametrize("offset, spread", [(1e8, 1.0), (1e6, 0.01), (-3e9, 0.5)])
def test_a_small_spread_around_a_large_mean_keeps_its_digits(offset, spread):
    rng = np.random.default_rng(0)
    values = offset + spread * rng.choice([-1.0, 1.0], 1000)
    moments = masked_moments(torch.tensor(values), torch.ones(1000, dtype=torch.bool))
    merged = Moments()
    for part in np.split(values, [10, 400]):
        merged = merged.merge(moments_of(torch.tensor(part)))
    for found in (moments, merged):
        assert found.std(ddof=0) == pytest.approx(values.std(), rel=1e-6)
        assert found.mean == pytest.approx(values.mean(), rel=1e-14)


def test_a_kl_penalty_of_rows_is_discounted_like_the_advantage():
    mask = torch.tensor([[True, False, True, True]])
    kl = torch.tensor([[0.1, 9.0, 0.2, 0.3]]).double()
    rows = torch.tensor([2.0]).double()
    found = broadcast_to_tokens(rows, mask, kl=kl, kl_coef=0.5, gamma=0.9).advantages
    last = 2.0 - 0.5 * 0.3
    middle = 0.9 * 2.0 - 0.5 * (0.2 + 0.9 * 0.3)
    first = 0.9**2 * 2.0 - 0.5 * (0.1 + 0.9 * 0.2 + 0.9**2 * 0.3)
    assert found[0].tolist() == pytest.approx([first, 0.0, middle, last])


def test_only_some_estimators_ask_for_whitening():
    whitened = {name for name, traits in TRAITS.items() if traits.whitens}
    assert whitened == {"gae", "reinforce++", "reinforce_baseline"}
    assert ADVANTAGE_ESTIMATORS.load("grpo") is ADVANTAGE_ESTIMATORS.load("group_norm")
    assert {name for name, traits in TRAITS.items() if traits.needs_greedy_rewards} == {"remax"}
    assert {name for name, traits in TRAITS.items() if traits.needs_critic} == {"gae"}


def test_wrong_kind_unknown_name_and_unknown_option_are_errors():
    with pytest.raises(ValueError, match="call estimate_token_advantages"):
        _estimate("gae", _inputs(REWARDS))
    with pytest.raises(ValueError, match="call estimate_row_advantages"):
        estimate_token_advantages(build_advantage_estimator("grpo", {}), ONE_TOKEN)

    with pytest.raises(ValueError, match="needs the critic's values"):
        estimate_token_advantages(build_advantage_estimator("gae", {}), ONE_TOKEN)

    @advantage_estimator(is_token_level=True)
    def no_tokens(inputs):
        return inputs.token_rewards

    with pytest.raises(ValueError, match="must return TokenAdvantages: got Tensor"):
        estimate_token_advantages(no_tokens, ONE_TOKEN)
    with pytest.raises(ValueError, match=r"one advantage per row, a tensor of shape \(4,\)"):
        estimate_row_advantages(lambda inputs: inputs.rewards[:2], _inputs(REWARDS))
    with pytest.raises(ValueError, match="did you mean reinforce"):
        build_advantage_estimator("reinforce+", {})
    with pytest.raises(ValueError, match="'rloo' has no option 'eps'"):
        build_advantage_estimator("rloo", {"eps": 1e-3})
    with pytest.raises(ValueError, match=r"std.*clip_filter.*centre"):
        _estimate("cpgd", _inputs(REWARDS), {"weighting": "x"})
