"""Off-policy correction weights."""

import functools

import numpy as np
import pytest
import torch

from lightrft.algorithms.correction_terms import (
    CORRECTION_PRESETS,
    PAIRS,
    STATISTICS,
    CorrectionTerm,
    parse_correction,
)
from lightrft.algorithms.corrections import correction_weights
from lightrft.algorithms.moments import effective_sample_fraction, effective_sample_sums


def _weights(batch, text, *, advantages=None, new=None, **bounds):
    return correction_weights(
        torch.as_tensor(batch.old),
        torch.as_tensor(batch.rollout),
        torch.as_tensor(batch.mask),
        terms=parse_correction(text, **bounds),
        advantages=advantages,
        new_logprobs=torch.as_tensor(batch.old if new is None else new),
    )


@pytest.mark.parametrize(
    "mode", ["tis", "icepop", "mis", "tis-sequence", "tis-geometric", "geometric"]
)
def test_equals_a_loop_on_random_rows(mode, ragged):
    batch = ragged(5)
    low, high = (0.0, 1.1) if mode.startswith("tis") else (0.9, 1.1)
    result = _weights(batch, mode, low=low, high=high)
    expected, capped, rejected = np.zeros_like(batch.old), 0, 0
    for i, t in zip(*np.nonzero(batch.mask), strict=True):
        logs = (batch.old[i] - batch.rollout[i])[batch.mask[i]]
        token = np.exp(batch.old[i, t] - batch.rollout[i, t])
        level = {"sequence": np.exp(logs.sum()), "geometric": np.exp(logs.mean())}
        if mode == "mis":
            tested = applied = level["sequence"]
        elif mode == "geometric":
            tested, applied = level["geometric"], token
        else:
            tested = applied = level.get(mode.removeprefix("tis-"), token)
        if mode.startswith("tis"):
            expected[i, t] = min(applied, high)
            capped += applied > high
        else:
            inside = low <= tested <= high
            expected[i, t] = applied * inside
            rejected += not inside
    np.testing.assert_allclose(result.weights.numpy(), expected, atol=1e-12)
    assert (result.is_capped.sum(), result.is_rejected.sum()) == (capped, rejected)
    assert capped + rejected > 0


def _slow_statistic(name, old, rollout):
    l, p, q = old - rollout, np.exp(old), np.exp(rollout)
    if name == "binary_kl":
        return q * -l + (1 - q) * np.log((1 - q) / (1 - p))
    return {
        "ratio": np.exp(l),
        "distance": abs(np.exp(l) - 1),
        "k1": -l,
        "k2": l**2 / 2,
        "k3": np.exp(l) - 1 - l,
        "reverse_k3": np.exp(-l) - 1 + l,
        "difference": p - q,
        "variation": abs(p - q),
    }[name]


SIDES = {"old": "old", "engine": "rollout", "new": "new"}


def _slow_rejection(batch, action, statistic, level, low, high, *, pair="old/engine"):
    """Which tokens are rejected, by loops over rows and tokens."""
    first, second = (getattr(batch, SIDES[side]) for side in pair.split("/"))
    rejected = np.zeros_like(batch.mask)
    for i, kept in enumerate(batch.mask):
        if not kept.any():
            continue
        tokens = [
            _slow_statistic(statistic, first[i, t], second[i, t]) for t in np.nonzero(kept)[0]
        ]
        is_ratio = statistic == "ratio"
        of_row = {
            "sequence": np.prod(tokens) if is_ratio else np.sum(tokens),
            "geometric": np.prod(tokens) ** (1 / len(tokens)) if is_ratio else np.mean(tokens),
            "largest": max(tokens),
        }
        values = [of_row[level]] * len(tokens) if level in of_row else tokens
        outside = [not low <= value <= high for value in values]
        if action == "veto" or level == "worst":
            outside = [any(outside)] * len(outside)
        rejected[i, kept] = outside
    return rejected


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "worst", "largest"])
@pytest.mark.parametrize("action", ["reject", "veto"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_test_of_every_statistic_and_pair_equals_a_loop(
    pair, action, statistic, level, ragged
):
    batch = ragged(12, rows=12)
    for name in SIDES.values():  # probabilities below one
        setattr(batch, name, np.minimum(getattr(batch, name), -0.05))
    first, second = (getattr(batch, SIDES[side]) for side in pair.split("/"))
    centre = float(np.median(_slow_statistic(statistic, first, second)[batch.mask]))
    spread = {"sequence": 3, "geometric": 0.2}.get(level, 1)
    low, high = centre - 0.1 * spread, centre + 0.3 * spread
    if statistic not in ("k1", "difference"):
        low = max(low, 0.001)
    result = _weights(
        batch, f"{action}:{statistic}:{level}:low={low}:high={high}:{pair}", new=batch.new
    )
    expected = _slow_rejection(batch, action, statistic, level, low, high, pair=pair)
    np.testing.assert_array_equal(result.is_rejected.numpy(), expected)
    np.testing.assert_array_equal(result.weights.numpy(), 1.0 * (batch.mask & ~expected))
    if (action, level) == ("reject", "token"):
        assert 0 < expected.sum() < batch.mask.sum()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_of_mean_one_over_ranks(level, ragged):
    batch = ragged(14, rows=6)
    text = f"weight:ratio:{level}:high=1.1:mean-one reject:k2:token:high=0.05"
    free = _weights(batch, text.replace(":mean-one", "")).weights
    whole = _weights(batch, text)
    parts = [
        correction_weights(
            *(torch.tensor(x[rows]) for x in (batch.old, batch.rollout, batch.mask)),
            terms=parse_correction(text),
        )
        for rows in (slice(0, 2), slice(2, 6))
    ]
    total = sum(part.sums for part in parts)
    torch.testing.assert_close(total, whole.sums)
    logs = np.where(batch.mask, batch.old - batch.rollout, 0.0)
    lengths = batch.mask.sum(1)
    if level == "token":
        mean = np.exp(logs)[batch.mask].clip(max=1.1).mean()
    else:
        rows = logs.sum(1) / (1 if level == "sequence" else lengths.clip(min=1))
        mean = np.exp(rows[lengths > 0]).clip(max=1.1).mean()
    weights = torch.cat([part.normalized(total).weights for part in parts])
    torch.testing.assert_close(weights, free / mean)
    assert mean != pytest.approx(1.0, abs=1e-3)
    assert whole.normalized(torch.zeros(2)).weights.equal(free)  # nothing anywhere


@pytest.mark.parametrize("mode", CORRECTION_PRESETS)
@pytest.mark.parametrize("side", ["rollout", "old"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_logprob_that_is_not_a_number_is_rejected_and_flagged(mode, side, value, ragged):
    batch = ragged(15, rows=4)
    batch.mask[:2, :3] = True
    getattr(batch, side)[0, 1] = value
    advantages = torch.ones(batch.mask.shape)
    result = _weights(batch, mode, advantages=advantages)
    flagged = np.zeros_like(batch.mask)
    flagged[0, 1] = True
    np.testing.assert_array_equal(result.is_invalid.numpy(), flagged)
    assert result.is_rejected[0, 1]
    assert result.weights[0, 1] == 0
    assert torch.isfinite(result.weights).all()
    assert torch.isfinite(result.raw).all()
    assert torch.isfinite(result.sums).all()
    alone = _weights(batch, mode, advantages=advantages)
    torch.testing.assert_close(result.weights[1:], alone.weights[1:])
    if "sequence" in CORRECTION_PRESETS[mode] or "veto" in CORRECTION_PRESETS[mode]:
        assert result.is_rejected[0][torch.tensor(batch.mask[0])].all()  # the row is unknown


def test_long_rows_do_not_overflow():
    old, rollout = torch.zeros(1, 400), torch.full((1, 400), -3.0)
    mask = torch.ones(1, 400, dtype=torch.bool)
    for mode in CORRECTION_PRESETS:
        terms = parse_correction(mode)
        result = correction_weights(
            old, rollout, mask, terms=terms, advantages=old, new_logprobs=old
        )
        assert torch.isfinite(result.weights).all()
        assert result.weights.dtype == torch.float32


def test_equal_policies_have_weight_one_under_every_preset(worked):
    for mode in CORRECTION_PRESETS:
        result = correction_weights(
            worked.old,
            worked.old,
            worked.mask,
            terms=parse_correction(mode),
            advantages=worked.advantages,
            new_logprobs=worked.old,
        )
        assert result.weights[worked.mask].tolist() == [1.0] * 6


def test_effective_sample_fraction(worked):
    weights = _weights(worked, "tis").raw
    sums = effective_sample_sums(weights, worked.mask)
    assert effective_sample_fraction(sums) == pytest.approx(0.624202, abs=1e-6)
    assert effective_sample_fraction(torch.zeros(3)) == 0.0


def test_rows_that_drifted_are_dropped_only_with_a_negative_advantage():
    mask = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    rollout = torch.zeros(4, 2)
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-0.2, 9.0], [-9.0, -9.0]])
    advantages = torch.tensor([[-1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2])
    correct = functools.partial(
        correction_weights,
        torch.zeros(4, 2),
        rollout,
        mask,
        terms=parse_correction("off-policy-mask"),
        new_logprobs=logprobs,
    )
    result = correct(advantages=advantages)
    assert result.weights.tolist() == [[0.0] * 2, [1.0] * 2, [1.0, 0.0], [0.0] * 2]
    with pytest.raises(ValueError, match="needs the advantages"):
        correct()


@pytest.mark.parametrize("level", ["token", "geometric", "worst"])
def test_of_rows_that_drifted_only_what_moved_towards_its_advantage_is_dropped(level, ragged):
    batch = ragged(8, rows=12)
    advantages = np.random.default_rng(3).normal(size=batch.mask.shape)
    text = f"reject:distance:{level}:high=0.1:towards"
    found = _weights(batch, text, advantages=torch.as_tensor(advantages))
    moved = batch.old - batch.rollout
    expected = _slow_rejection(batch, "reject", "distance", level, 0.0, 0.1)
    if level == "worst":
        # The row is left out where one of its tokens moved too far in that direction.
        alone = _slow_rejection(batch, "reject", "distance", "token", 0.0, 0.1)
        expected = batch.mask & (alone & (moved * advantages > 0)).any(1, keepdims=True)
    else:
        expected &= moved * advantages > 0
    assert 0 < expected.sum() < batch.mask.sum()
    assert np.array_equal(found.is_rejected.numpy(), expected)


def test_dppo_leaves_out_what_moved_too_far_towards_its_advantage():
    new, rollout = (torch.tensor([row]).log() for row in ([0.9, 0.5, 0.1], [0.5, 0.5, 0.5]))
    mask = torch.ones(1, 3, dtype=torch.bool)
    for sign, kept in ((1.0, [0.0, 1.0, 1.0]), (-1.0, [1.0, 1.0, 0.0])):
        result = correction_weights(
            rollout,
            rollout,
            mask,
            terms=parse_correction("dppo"),
            advantages=torch.full((1, 3), sign),
            new_logprobs=new,
        )
        assert result.weights[0].tolist() == kept


def test_a_weight_may_be_that_of_the_rows_largest_ratio(ragged):
    batch = ragged(22)
    found = _weights(batch, "weight:ratio:largest:high=1.5:new/old", new=batch.new).weights.numpy()
    for i, inside in enumerate(batch.mask):
        ratios = np.exp(batch.new - batch.old)[i][inside]
        expected = min(ratios.max(initial=0.0), 1.5)
        np.testing.assert_allclose(found[i][inside], expected)


def test_binary_kl_of_certain_tokens_is_finite_or_outside_every_bound():
    mask = torch.ones(1, 3, dtype=torch.bool)
    new, old = torch.tensor([[0.0, 1e-7, 0.0]]), torch.tensor([[0.0, 0.0, -0.7]])
    terms = parse_correction("reject:binary_kl:token:high=0.1:new/old")
    found = correction_weights(old, old, mask, terms=terms, new_logprobs=new)
    assert found.weights.tolist() == [[1.0, 1.0, 0.0]]
    assert not found.is_invalid.any()


def test_weights_of_the_new_policy_are_detached(worked):
    new = worked.new.clone().requires_grad_(True)
    terms = parse_correction("weight:ratio:token:new/old reject:k3:sequence:high=0.4:new/engine")
    found = correction_weights(
        worked.old, worked.rollout, worked.mask, terms=terms, new_logprobs=new
    )
    assert not found.weights.requires_grad
    with pytest.raises(ValueError, match="new policy needs its log-probabilities"):
        correction_weights(worked.old, worked.rollout, worked.mask, terms=terms)


def test_text_becomes_terms():
    assert parse_correction("weight:ratio:token:high=2") == parse_correction("tis")
    assert parse_correction("tis") == (CorrectionTerm("weight", "ratio", "token", None, 2.0),)
    several = (
        CorrectionTerm("reject", "k3", "sequence", None, 0.01),
        CorrectionTerm("weight", "ratio", "token", None, 3.0, mean_one=True),
    )
    texts = ["reject:k3:sequence:high=0.01", "tis:high=3:mean-one"]
    assert parse_correction(texts) == parse_correction(" ".join(texts)) == several
    weight, test = parse_correction("icepop", low=0.2)
    assert (weight.low, weight.high, test.low, test.high) == (None, None, 0.2, 5.0)
    (capped,) = parse_correction("tis", low=0.5, high=4.0)
    assert (capped.low, capped.high) == (0.5, 4.0)
    for sign in ("negative", "towards"):
        assert parse_correction(f"reject:k1:geometric:high=1:{sign}")[0].sign == sign
    # A pair is that of all terms of a preset.
    pairs = {"dppo": "new/engine", "dppo:old/engine": "old/engine", "icepop:new/old": "new/old"}
    for text, pair in pairs.items():
        assert {term.pair for term in parse_correction(text)} == {pair}
    following = {
        name
        for name in CORRECTION_PRESETS
        if any(term.follows_policy for term in parse_correction(name))
    }
    assert following == {"dppo", "off-policy-mask"}


@pytest.mark.parametrize(
    "text, bounds, message",
    [
        ("tiss", {}, "did you mean 'tis'"),
        ("", {}, "such as tis or reject:k3:sequence:high=0.01: got none"),
        ("reject:k4:token:high=1", {}, "unknown statistic of a correction 'k4'"),
        ("reject:k3:rows:high=1", {}, "expected one of geometric, largest, sequence, token, worst"),
        ("reject:k3", {}, "'reject:k3' is incomplete"),
        ("reject:k3:token:hihg=1", {}, "did you mean 'high='"),
        ("reject:k3:token:high=big", {}, "'big' is not a number"),
        ("reject:k3:token", {}, "needs low=, high= or both"),
        ("reject:k3:token:high=1:mean-one", {}, "has no mean-one"),
        ("tis:mean-one dppo", {}, "has mean-one and compares the new policy"),
        ("tis:new/olt", {}, "did you mean 'new/old'"),
        ("reject:k3:token:high=nan", {}, "needs finite bounds with 0 <= low < high"),
        ("reject:k3:token:low=-1", {}, "needs finite bounds with 0 <= low < high"),
        ("veto:k1:token:low=2:high=1", {}, "needs finite bounds with low < high"),
        ("icepop", {"low": 3.0, "high": 2.0}, "0 <= low < high"),
        ("tis", {"low": 2.0}, "0 <= low < high"),
        ("weight:k3:token", {}, "a weight is the ratio"),
        ("weight:ratio:worst", {}, "a weight is the ratio"),
        ("tis tis-geometric", {}, "several weights"),
        ("tis:negative", {}, "0 terms that negative could belong to"),
        ("geometric-tis", {"high": 2.0}, "2 terms that high=2.0 could belong to"),
    ],
)
def test_mistakes_are_named(text, bounds, message):
    with pytest.raises(ValueError, match=message):
        parse_correction(text, **bounds)
