"""Formulas that are polynomials with rational and square root coefficients, compared exactly."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

# Names with their exponents, in order; the square root of a prime has that prime for a name.
Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]

_MAX_TOKENS, _MAX_TERMS, _MAX_BITS, _MAX_EXPONENT, _MAX_ROOT = 100, 30, 200, 10, 10**6
# A command takes the space behind it; others may separate a unit or two numbers. `d` and `e` are
# differentials and Euler's number. math-verify takes those of _UNITS for units where they end a
# text, so that it finds 2t+4 and 4+2t different.
_UNITS = frozenset("cghlmost")
_COMMAND = r"\\(?:[dt]?frac|sqrt|cdot|times|pi)(?![A-Za-z]) ?"
_TOKEN = re.compile(rf"{_COMMAND}|[0-9]+|[a-cf-z]|[-+*/^(){{}}]")
_PRODUCTS = ("*", "\\cdot", "\\times")


class _OtherFormError(Exception):
    """The formula is none of these, or could be read in several ways."""


def equal_polynomials(left: str, right: str) -> bool | None:
    """Whether two formulas are the same polynomial in the same letters; None where either is none.

    None, too, where they differ by so little that they may pass as equal, and where a letter that
    may be a unit stands in one of them only.

    Args:
        left, right: Without spaces that separate nothing.
    """
    if _UNITS & {*_TOKEN.findall(left)} != _UNITS & {*_TOKEN.findall(right)}:
        return None
    try:
        first, second = _FormulaReader(left).whole(), _FormulaReader(right).whole()
    except _OtherFormError:
        return None
    if first == second:
        return True
    if _letters(first) != _letters(second):
        return None
    one, two = _values(first), _values(second)
    gaps = ((one.get(key, 0.0), two.get(key, 0.0)) for key in one.keys() | two.keys())
    return None if all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in gaps) else False


def _letters(polynomial: Polynomial) -> set[str]:
    return {name for monomial in polynomial for name, _ in monomial if name.isalpha()} - {"pi"}


def _values(polynomial: Polynomial) -> dict[Monomial, float]:
    """The coefficient of each product of letters as a float."""
    values: dict[Monomial, float] = {}
    for monomial, factor in polynomial.items():
        letters = tuple(pair for pair in monomial if pair[0].isalpha() and pair[0] != "pi")
        value = float(factor)
        for name, exponent in monomial:
            if (name, exponent) not in letters:
                value *= math.pi**exponent if name == "pi" else math.sqrt(int(name))
        values[letters] = values.get(letters, 0.0) + value
    return values


class _FormulaReader:
    """One formula, read from left to right; anything unexpected is an `_OtherFormError`."""

    def __init__(self, text: str) -> None:
        self._tokens = [token.rstrip() for token in _TOKEN.findall(text)]
        if sum(map(len, _TOKEN.findall(text))) != len(text) or len(self._tokens) > _MAX_TOKENS:
            raise _OtherFormError
        self._place = 0

    def whole(self) -> Polynomial:
        """The polynomial of the whole text."""
        found = self._sum()
        if self._next() or not self._tokens:
            raise _OtherFormError
        return found

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, *tokens: str) -> str:
        """The next token if it is one of these, or of any kind where none is named; else empty."""
        token = self._next()
        if tokens and token not in tokens:
            return ""
        self._place += 1
        return token

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise _OtherFormError

    def _sum(self) -> Polynomial:
        total: Polynomial = {}
        sign = self._take("+", "-")
        while True:
            factor = Fraction(-1 if sign == "-" else 1)
            total = _added(total, _product(self._product(), {(): factor}))
            sign = self._take("+", "-")
            if not sign:
                return total

    def _product(self) -> Polynomial:
        before = self._next()
        found = self._power()
        is_divided = False
        while True:
            token = self._next()
            if self._take("/"):
                found, is_divided = _product(found, _inverse(self._power())), True
            elif self._take(*_PRODUCTS):
                found, is_divided = _product(found, self._power()), False
            elif token in ("", "+", "-", ")", "}"):
                return found
            else:
                factor = self._power()
                # 1/2x, 2\frac{1}{2}, 3(4), x2, f(x) and words have other readings.
                if is_divided or token.isdigit() or token.endswith("frac"):
                    raise _OtherFormError
                if before.isalpha() and (token == "(" or token.isalpha()):
                    raise _OtherFormError
                if token == "(" and _letters(factor) in (set(), {"i"}):
                    raise _OtherFormError
                found = _product(found, factor)
            before = token

    def _power(self) -> Polynomial:
        base = self._base()
        if not self._take("^"):
            return base
        if self._take("{"):
            digits = self._take()
            self._need("}")
        else:
            digits = self._take()
            if len(digits) > 1:  # x^12 is x^{1}2 in LaTeX
                raise _OtherFormError
        if not digits.isdigit() or len(digits) > 2 or int(digits) > _MAX_EXPONENT:
            raise _OtherFormError
        if any(("i", 1) in monomial for monomial in base):
            raise _OtherFormError
        found: Polynomial = {(): Fraction(1)}
        for _ in range(int(digits)):
            found = _product(found, base)
        return found

    def _base(self) -> Polynomial:
        token = self._take()
        if token.isdigit():
            if len(token) > 1 and token[0] == "0":
                raise _OtherFormError
            return _bounded({(): Fraction(int(token))} if len(token) < _MAX_BITS // 4 else {})
        if token == "\\pi" or token.isalpha():
            return {((token.removeprefix("\\"), 1),): Fraction(1)}
        if token == "(":
            found = self._sum()
            self._need(")")
            return found
        if token == "\\sqrt":
            return _root(self._argument())
        if token.endswith("frac"):
            numerator = self._argument()
            return _product(numerator, _inverse(self._argument()))
        raise _OtherFormError

    def _argument(self) -> Polynomial:
        self._need("{")
        found = self._sum()
        self._need("}")
        return found


def _added(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, factor in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    return _bounded(total)


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for one, factor in left.items():
        for two, other in right.items():
            monomial, number = _joined(one, two)
            total[monomial] = total.get(monomial, Fraction(0)) + factor * other * number
    return _bounded(total)


def _joined(left: Monomial, right: Monomial) -> tuple[Monomial, int]:
    """The product of two monomials, and the primes whose roots met."""
    exponents, number = dict(left), 1
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
        if name.isdigit() and exponents[name] == 2:
            del exponents[name]
            number *= int(name)
    if exponents.get("i", 0) > 1:
        raise _OtherFormError
    return tuple(sorted(exponents.items())), number


def _inverse(divisor: Polynomial) -> Polynomial:
    """One divided by a number times a root."""
    if len(divisor) != 1:
        raise _OtherFormError
    ((monomial, factor),) = divisor.items()
    if not all(name.isdigit() for name, _ in monomial):
        raise _OtherFormError
    return {monomial: 1 / (factor * math.prod(int(name) for name, _ in monomial))}


def _root(radicand: Polynomial) -> Polynomial:
    value = radicand.get((), Fraction(0))
    number = value.numerator * value.denominator
    if radicand.keys() - {()} or not 0 <= number <= _MAX_ROOT:
        raise _OtherFormError
    outside, primes, prime = 1, list[int](), 2
    while prime * prime <= number:
        while number % (prime * prime) == 0:
            number //= prime * prime
            outside *= prime
        if number % prime == 0:
            number //= prime
            primes.append(prime)
        prime += 1
    primes += [number] * (number > 1)
    monomial = tuple((str(prime), 1) for prime in sorted(primes, key=str))
    return _bounded({monomial: Fraction(outside * (number > 0), value.denominator)})


def _bounded(polynomial: Polynomial) -> Polynomial:
    """It without vanishing terms, if it is small: what a model writes must not take long."""
    found = {monomial: factor for monomial, factor in polynomial.items() if factor}
    sizes: Sequence[int] = [
        max(factor.numerator.bit_length(), factor.denominator.bit_length())
        for factor in found.values()
    ]
    if len(found) > _MAX_TERMS or max(sizes, default=0) > _MAX_BITS:
        raise _OtherFormError
    return found
