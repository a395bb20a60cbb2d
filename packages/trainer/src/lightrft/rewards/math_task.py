"""The part of mathematics rewards that runs in a worker: grading by math-verify.

math-verify limits its time by SIGALRM, which works in a main thread only and does not stop native
code; here its limits are off and the parent kills the worker at the deadline.
"""

from __future__ import annotations

import logging
from typing import cast


class MathGrader:
    """Compares two answers in LaTeX or plain notation by their mathematical value."""

    def __init__(self) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.CRITICAL)
        self._parse = math_verify.parse
        self._verify = math_verify.verify
        self(("\\frac{1}{2}", "0.5"))  # loads the grammar now, not within the first deadline

    def describe(self) -> object:
        """Nothing to say."""
        return None

    def __call__(self, request: object) -> bool:
        """Whether (answer, gold) are equal by value; what cannot be parsed has no value."""
        answer, gold = cast("tuple[str, str]", request)
        parsed_gold = self._parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        parsed = self._parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not parsed_gold or not parsed:
            return False
        return bool(self._verify(parsed_gold, parsed, timeout_seconds=None))
