"""Formulas as math-verify compares them, and letters that it would take for units."""

import pytest
from tests.machine import seconds

from lightrft.rewards.process import WorkerProcess, WorkerTask
from lightrft.tools.rewards.math_grader import readings

EQUAL = [
    ("4x+5", "5+4x"),
    ("-x^2+x", "x-x^2"),
    ("3+4i", "4i+3"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\sqrt{\frac{1}{2}}", r"\sqrt{2}/2"),
    (r"2\pi r", r"2r \pi"),
    ("(x+1)(x-1)", "x^{2} - 1"),
    (r"\left( x + 1 \right)^2", "x^2+2x+1"),
    (r"\dfrac{x+1}{2}", r"\frac{1}{2}x+1/2"),
    ("2x/3", r"\frac{2}{3} \cdot x"),
    (r"\sqrt{6}\sqrt{10}", r"2\sqrt{15}"),
]
DIFFERENT = [
    ("4x+5", "4x+6"),
    ("3-2i", "3+2i"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    (r"\frac{22}{7}", r"\pi"),
    (r"2\sqrt{2}", "3"),
    ("x^2", "x^3"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{2}}{2}"),
]
# Letters that math-verify takes for units where they end a text: it finds the first ones different.
UNITS = [
    ("2t+4", "4+2t", True),
    ("c-1", "-1+c", True),
    ("(l+1)^2", "l^2+2l+1", True),
    ("m^2", r"m \cdot m", True),
    ("2t+4", "4-2t", False),
    ("3m", "4m", False),
    ("5 m", "5m", True),
    ("-t", "-1t", True),
    (r"\frac{t}{2}", r"\frac{1}{2}t", True),
    (r"2\pi t", r"2t\pi", True),
    (r"\sqrt{2}t", r"t\sqrt{2}", True),
    ("5t", r"t\cdot5", True),
    ("2t", "t+t", True),
    ("4s", "s+3s", True),
    ("4t", "2(2t)", True),
    ("-2t", "2(-t)", True),
    ("s=2t", "2t=s", True),
    (r"\sin t", r"\sin(t)", True),
    ("t", "2t", False),
    ("(t+2)t", "t+2", False),
    (r"5\times10^2\text{ g}", r"5\times 10^2 g", True),
    (r"5\times10^2\mathrm{ g}", r"5\times 10^2 g", True),
    (r"5\mbox{ m}", "5m", True),
    ("5m", "5", True),
    (r"5\text{ m}", "5m", True),
    ("1,000m", "1000 m", True),
    ("0.5 m", "1/2 m", True),
    ("5.5h", r"5\frac{1}{2}h", True),
    (r"5\times10^3 m", "5000m", True),
]


def test_formulas_are_equal_or_different_both_ways_round():
    cases = [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in DIFFERENT] + UNITS
    # In a process of its own: other tests see to it that this one does not import it.
    grader = WorkerProcess(WorkerTask("lightrft.tools.rewards.math_grader", "MathGrader"))
    try:
        for left, right, expected in cases:
            for pair in ((left, right), (right, left)):
                assert grader.call((*pair, 10.0), seconds=seconds(60)) is expected, pair
    finally:
        grader.close()


@pytest.mark.parametrize(
    "pair",
    [("5m", "5"), ("0m+5", "5"), ("2m", "2s"), ("5cm", "50mm"), (r"5\text{ m}", "5m")],
)
def test_letters_that_may_be_units_keep_their_names(pair):
    assert readings(*pair) == [pair]
