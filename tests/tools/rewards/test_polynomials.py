"""Formulas that are compared exactly, and those that are left to math-verify."""

from __future__ import annotations

import importlib.util

import pytest
from tests.machine import seconds

from lightrft.rewards.process import WorkerProcess, WorkerTask
from lightrft.tools.rewards.math_rules import normalize
from lightrft.tools.rewards.polynomials import equal_polynomials

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
    ("2t+4", "4-2t", False),
    ("3m", "4m", False),
    ("5m", "5", None),
    ("0m+5", "5", None),
    ("2m", "2s", None),
    ("5 m", "5m", None),
    ("5cm", "50mm", None),
    (r"5\text{ m}", "5m", None),
    ("2x+m", "2x", None),
]
# What has other readings, other letters, or a form that this knows nothing of.
OTHER = [
    ("1/2x", "x/2"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    ("3(4)", "12"),
    ("x4", "4x"),
    ("x^12", "x^{12}"),
    ("seat", "east"),
    ("f(x)", "fx"),
    ("i^2", "-1"),
    ("5m", "5"),
    ("12 i", "12i"),
    ("X", "x"),
    ("x", "y"),
    ("0.5x", "x/2"),
    ("x=5", "5"),
    ("(1,2)", "(2,1)"),
    (r"\frac{1}{x}", "1/x"),
    (r"\sqrt{x}", "x"),
    (r"\sqrt{-1}", "i"),
    ("--x", "x"),
    ("x/0", "x"),
    ("{3}", "3"),
    (r"\frac{x", "x"),
    ("", "x"),
    ("50%", "50"),
    ("\u0663", "3"),
    ("x^\u00b2", "x"),
]


def decided(left: str, right: str) -> bool | None:
    return equal_polynomials(normalize(left), normalize(right))


def test_equal_and_different_formulas_are_decided_both_ways_round() -> None:
    assert [decided(*pair) for pair in EQUAL] == [True] * len(EQUAL)
    assert [decided(b, a) for a, b in EQUAL] == [True] * len(EQUAL)
    assert [decided(*pair) for pair in DIFFERENT] == [False] * len(DIFFERENT)


@pytest.mark.parametrize(("left", "right", "expected"), UNITS)
def test_letters_of_units_are_variables_where_both_sides_have_them(left, right, expected) -> None:
    assert decided(left, right) is expected
    assert decided(right, left) is expected


@pytest.mark.parametrize("pair", OTHER)
def test_what_has_another_form_or_two_readings_is_left_undecided(pair) -> None:
    assert decided(*pair) is None
    assert decided(pair[1], pair[0]) is None


@pytest.mark.parametrize(
    "formula",
    [
        "(" * 300 + "1" + ")" * 300,
        "(x+y+z)^10",
        "9" * 999,
        "+".join("x" * 400),
        "(2^10)^{99}",
        r"\frac{1}{" * 60 + "2" + "}" * 60,
        "*".join(["(x+y)"] * 40),
        r"\sqrt{999999999999989}",
    ],
)
def test_large_formulas_are_left_undecided(formula: str) -> None:
    assert decided(formula, "x") is None


@pytest.mark.full
def test_math_verify_decides_alike() -> None:
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("package math-verify is not installed")
    # In a process of its own: other tests see to it that this one does not import it.
    grader = WorkerProcess(WorkerTask("lightrft.tools.rewards.math_grader", "MathGrader"))
    try:
        found = [grader.call((*pair, 10.0), seconds=seconds(60)) for pair in EQUAL + DIFFERENT]
    finally:
        grader.close()
    assert found == [True] * len(EQUAL) + [False] * len(DIFFERENT)
