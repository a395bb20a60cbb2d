"""Finding final answers, and the comparison that needs no grader."""

from fractions import Fraction

import pytest

from lightrft.tools.rewards.math_rules import last_boxed, last_hashes, quick_match, to_number


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{3} no, \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{\text{a \} b} {c}}", r"\text{a \} b} {c}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{\boxed{9}}", "9"),
        (r"\boxed{3} then cut off \boxed{\frac{1", "3"),
        (r"\boxed{}", ""),
        (r"boxed{3}", None),
        (r"\boxed 3", None),
        ("", None),
    ],
)
def test_last_boxed_balances_braces(text, answer):
    assert last_boxed(text) == answer


def test_last_hashes_takes_the_last_mark_to_the_end_of_its_line():
    assert last_hashes("#### 1\nso\n####  1,234 \nbye") == "1,234"
    assert last_hashes("### 1") is None


@pytest.mark.parametrize(
    "text, number",
    [
        ("18", 18),
        ("-1,234.50", Fraction("-1234.5")),
        ("$ 18.", 18),
        (r"\$70,000", 70000),
        ("3/4", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("+2", 2),
        ("1\\,000", 1000),
        ("1,23", None),
        ("1/0", None),
        ("1/2/3", None),
        ("1 1/2", None),
        ("1 2", None),
        ("x", None),
        ("", None),
        ("-", None),
        (".", None),
        ("1e3", None),
    ],
)
def test_plain_numbers(text, number):
    assert to_number(text) == number


@pytest.mark.parametrize(
    "answer, gold, match",
    [
        ("18.0", "18", True),
        ("0.50", "1/2", True),
        ("19", "18", False),
        ("1,000", "1000", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("east", "east", True),
        ("", "3", False),
        ("1 2", "12", None),
        ("50%", "50%", True),
        ("50%", "50", None),
        ("40%", "50%", False),
        ("x+1", "1+x", None),
        ("x=1", "1", None),
        (r"\frac{1}{2}", "0.5", None),
        ("", "", False),
    ],
)
def test_quick_match_decides_only_what_is_plain(answer, gold, match):
    assert quick_match(answer, gold) is match
