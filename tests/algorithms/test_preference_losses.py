"""Preference losses against worked numbers, finite differences and identities, in float64."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightrft.algorithms import preference_losses as losses
from lightrft.algorithms.preference_losses import AnswerSums, PreferenceSums


def sums_of(rows, **more):
    """From rows of (c, r, cr, rr, n_c, n_r)."""
    c, r, cr, rr, n_c, n_r = torch.tensor(rows, dtype=torch.float64).T
    tokens = float(n_c.mean())
    return PreferenceSums(AnswerSums(c, cr, n_c), AnswerSums(r, rr, n_r), tokens, **more)


WORKED = sums_of([(-12, -15, -13, -14, 6, 10), (-8, -7.5, -7, -8, 5, 4)], kl=0.3)
S = torch.nn.functional.logsigmoid
# Loss, its mean over both pairs (or all four answers).
EXPECTED = {
    "dpo": (losses.dpo_loss, 0.6845479586),
    "cdpo": (losses.cdpo_loss, 0.6870479586),
    "robust": (losses.robust_loss, 0.6814229586),
    "hinge": (losses.hinge_loss, 0.9750000000),
    "ipo": (losses.ipo_loss, 25.3800347222),
    "apo_zero": (losses.apo_zero_loss, 0.9937591045),
    "apo_down": (losses.apo_down_loss, 0.9937979240),
    "simpo": (losses.simpo_loss, 1.5350884785),
    "orpo": (losses.orpo_loss, 0.0791033551 + 1.8181818182),
    "cpo": (losses.cpo_loss, 0.6364074462 + 1.8181818182),
    "cpo without nll": (partial(losses.cpo_loss, alpha=0.0), 0.6364074462),
    "sft": (losses.sft_loss, 1.8181818182),
}
BY_NAME = {name: function for name, function in vars(losses).items() if name.endswith("_loss")}
del BY_NAME["preference_loss"]


@pytest.mark.parametrize("name", EXPECTED)
def test_worked_numbers(name):
    loss, expected = EXPECTED[name]
    assert float(loss(WORKED).mean()) == pytest.approx(expected, abs=1e-9)


def slow(name, c, r, cr, rr, n_c, n_r, kl):
    """The rows of the table, one pair at a time."""
    u, v, b = c - cr, r - rr, 0.1
    x, s = b * (u - v), lambda t: 1 / (1 + math.exp(-t))
    log_s = lambda t: math.log(s(t))  # noqa: E731
    return {
        "exo_loss": s(x) * (log_s(x) - math.log(0.999)) + s(-x) * (log_s(-x) - math.log(0.001)),
        "nca_loss": -log_s(b * u) - 0.5 * log_s(-b * u) - 0.5 * log_s(-b * v),
        "sppo_loss": (u - 5) ** 2 + (v + 5) ** 2,
        "bco_loss": -log_s(b * u) - log_s(-b * v),
        "discopop_loss": -(1 - s(x / 0.05)) * log_s(x) + s(x / 0.05) * math.exp(-x),
        "dpo_norm_loss": -log_s(b * (u / n_c - v / n_r)),
        "kto_loss": (1 - s(b * (u - kl)), 1 - s(b * (kl - v))),
        "apo_zero_unpaired_loss": (1 - s(b * u), s(b * v)),
    }[name]


def ragged(num_pairs=6, *, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 40, (num_pairs, 2), generator=generator).double()
    logprobs = -tokens * torch.rand(num_pairs, 2, generator=generator, dtype=torch.float64)
    other = logprobs + torch.randn(num_pairs, 2, generator=generator, dtype=torch.float64)
    rows = torch.cat([logprobs, other, tokens], dim=1).tolist()
    return rows, sums_of(rows, **more)


@pytest.mark.parametrize(
    "name",
    [
        "exo_loss",
        "nca_loss",
        "sppo_loss",
        "bco_loss",
        "discopop_loss",
        "dpo_norm_loss",
        "kto_loss",
        "apo_zero_unpaired_loss",
    ],
)
def test_ragged_pairs_agree_with_the_table(name):
    rows, sums = ragged(kl=0.4)
    expected = torch.tensor([slow(name, *row, 0.4) for row in rows], dtype=torch.float64)
    found = BY_NAME[name](sums)
    torch.testing.assert_close(found, expected.movedim(-1, 0).reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["kto_loss", "apo_zero_unpaired_loss"])
def test_good_and_other_answers_have_weights(name):
    _, sums = ragged(kl=0.4)
    plain = BY_NAME[name](sums)
    found = BY_NAME[name](sums, desirable_weight=1.5, undesirable_weight=0.25)
    weights = torch.tensor([1.5] * 6 + [0.25] * 6, dtype=torch.float64)
    torch.testing.assert_close(found, weights * plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", BY_NAME)
def test_gradients_are_finite_differences(name):
    _, sums = ragged(seed=3, kl=0.2)
    weights = torch.randn(12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def total(c, r):
        found = BY_NAME[name](
            replace(
                sums,
                chosen=replace(sums.chosen, logprobs=c),
                rejected=replace(sums.rejected, logprobs=r),
            )
        )
        return (found * weights[: len(found)]).sum()

    c, r = (each.logprobs.clone().requires_grad_() for each in (sums.chosen, sums.rejected))
    assert torch.autograd.gradcheck(total, (c, r), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("size", [1e-13, 5000.0])
def test_loss_and_gradient_stay_finite(name, size):
    c, r = (torch.tensor([-size, -1.0, -size], dtype=torch.float64) for _ in range(2))
    c.requires_grad_(), r.requires_grad_()
    ones = torch.ones(3, dtype=torch.float64)
    reference = torch.tensor([-1.0, -size, -size], dtype=torch.float64)
    sums = PreferenceSums(AnswerSums(c, reference, ones), AnswerSums(r, -ones, ones))
    found = BY_NAME[name](sums)
    found.sum().backward()
    assert found.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in (c, r))


def test_log_odds_do_not_cancel():
    z = torch.tensor([-1e-14, -0.69, -0.70, -40.0], dtype=torch.float64)
    expected = [math.log(1e14), *(x - math.log(-math.expm1(x)) for x in z[1:].tolist())]
    assert losses.log_odds(z).tolist() == pytest.approx(expected, rel=1e-12)
    assert losses.log_odds(torch.zeros(1, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("name", ["aot_loss", "aot_unpaired_loss"])
def test_transport_does_not_know_which_pairs_belong_together(name):
    rows, sums = ragged(seed=7)
    found = BY_NAME[name](sums).mean()
    moved = [[*a[:2], *b[2:4], *a[4:]] for a, b in zip(rows, rows[::-1], strict=True)]
    if name == "aot_unpaired_loss":
        moved = [[a[0], b[1], a[2], b[3], *a[4:]] for a, b in zip(rows, rows[::-1], strict=True)]
    assert found == pytest.approx(float(BY_NAME[name](sums_of(moved)).mean()), rel=1e-12)
    policy = sorted(c - r for c, r, *_ in rows)
    reference = sorted(cr - rr for _, _, cr, rr, *_ in rows)
    if name == "aot_unpaired_loss":
        policy = sorted(c - cr for c, _, cr, *_ in rows)
        reference = sorted(r - rr for _, r, _, rr, *_ in rows)
    gaps = torch.tensor(policy, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    assert found == pytest.approx(float(-S(0.1 * gaps).mean()), rel=1e-12)
    assert found != pytest.approx(float(losses.dpo_loss(sums).mean()), rel=1e-6)


def test_no_smoothing_is_dpo():
    _, sums = ragged()
    plain = losses.dpo_loss(sums)
    for smoothed in (losses.cdpo_loss, losses.robust_loss):
        torch.testing.assert_close(smoothed(sums, label_smoothing=0.0), plain)


@pytest.mark.parametrize(
    "loss, options, said",
    [
        (
            "robust_loss",
            {"label_smoothing": 0.5},
            r"label_smoothing must be in \[0, 0.5\): got 0.5",
        ),
        ("exo_loss", {"label_smoothing": 0.0}, "label_smoothing must be positive: got 0.0"),
        ("ipo_loss", {"beta": 0.0}, "beta must be positive: got 0.0"),
    ],
)
def test_values_without_a_loss_are_refused(loss, options, said):
    with pytest.raises(ValueError, match=said):
        BY_NAME[loss](WORKED, **options)
