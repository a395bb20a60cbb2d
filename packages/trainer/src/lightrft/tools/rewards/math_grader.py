"""Comparison of two mathematical answers by value, in a worker process."""

import logging
import re
from typing import cast

from lightrft.tools.rewards.fork import Fork

# Letters that math-verify takes for units at the end of a text, which makes 2t+4 and 4+2t differ;
# and letters that may replace them.
_UNIT = re.compile(r"(?<![A-Za-z\\])[cghlmost](?![A-Za-z])")
_OTHER_LETTERS = "xyzuvwabknpqr"
_OPERATOR = re.compile(r".[-+*^(]|\\(?:cdot|times)\b")
_WORDS = re.compile(r"\\(?:text|math|mbox)")


class MathGrader:
    """Comparison of two answers in LaTeX or plain notation by mathematical value, in a worker.

    math-verify limits its time by SIGALRM, which does not stop native code; here its limits are
    off. Comparisons run in a fork of this process instead. The fork ends when one takes too much
    processor time. A new fork takes milliseconds; a new worker would load the grammar for seconds.
    """

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self._parse = math_verify.parse
        self._verify = math_verify.verify
        self._fork = Fork(self._verdict)
        self._compare("\\frac{1}{2}", "0.5")  # loads the grammar now, before any deadline

    def describe(self) -> object:
        """Return nothing: there is nothing to report."""
        return None

    def __call__(self, request: object) -> bool | None:
        """Return whether (answer, gold) have equal values; None beyond (seconds) of processor time.

        Answers that cannot be parsed equal nothing. A comparison that fails or ends its process
        returns None, too: a model's answer must not end the run.
        """
        answer, gold, seconds = cast("tuple[str, str, float]", request)
        return cast("bool | None", self._fork.call(answer, gold, seconds=seconds))

    def _verdict(self, answer: str, gold: str) -> bool | None:
        try:
            return self._compare(answer, gold)
        except Exception:  # noqa: BLE001 - RecursionError, MemoryError and bugs of parsers
            return None

    def _compare(self, answer: str, gold: str) -> bool:
        return any(self._are_equal(*pair) for pair in readings(answer, gold))

    def _are_equal(self, answer: str, gold: str) -> bool:
        parsed_gold = self._parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        parsed = self._parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not parsed_gold or not parsed:
            return False
        return bool(self._verify(parsed_gold, parsed, timeout_seconds=None))


def readings(answer: str, gold: str) -> list[tuple[str, str]]:
    """Return pairs of formulas; the answer is right if one pair is equal.

    Letters that might be units count as variables, under other names, if both formulas have the
    same ones and no words; where one computes nothing they count as units as well (`1,000m`).
    """
    pair, letters = (answer, gold), {*_UNIT.findall(answer)}
    if not letters or letters != {*_UNIT.findall(gold)} or any(map(_WORDS.search, pair)):
        return [pair]
    free = (letter for letter in _OTHER_LETTERS if letter not in answer + gold)
    names = dict(zip(sorted(letters), free, strict=False))
    answer, gold = (_UNIT.sub(lambda unit: names.get(unit[0], unit[0]), t) for t in pair)
    return [(answer, gold)] if all(map(_OPERATOR.search, pair)) else [(answer, gold), pair]
