"""The part of scoring with reasoning-gym that runs in a worker and calls its scorers."""

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from lightrft.rewards.worker import ReportedError
from lightrft.tools.rewards.fork import Fork

# Score, and whether the scorer worked.
Scored = tuple[float, Literal["scored", "failed"]]

# Scorers that pass the answer to `eval`, or to sympy's parser, which uses it. They only get answers
# that cannot call Python functions.
EVALUATED = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
_INTEGRATION = frozenset({"simple_integration", "intermediate_integration"})
PARSED = _INTEGRATION | {"polynomial_multiplication", "puzzle24", "countdown"}
_FORMULA = re.compile(r"(?:[0-9+\-*/^(), \t=]|\.(?![A-Za-z_])|[A-Za-z]+)*", re.ASCII)
_WORD = re.compile("(sin|cos|tan)h?|a(sin|cos|tan)|sec|csc|cot|exp|log|ln|sqrt|pi|Abs|erf|Si|Ci")
_PLAIN = re.compile(r"(?:[\w\s#-]|\.(?![A-Za-z_]))*", re.ASCII)


class GymScorer:
    """Scorer of the answers of one task; a hanging answer ends without the others.

    Args:
        name: Name of the task.
    """

    def __init__(self, name: str) -> None:
        try:
            import reasoning_gym
        except ImportError as err:
            raise ReportedError(
                "it needs the extra reasoning-gym (pip install 'lightrft[reasoning-gym]')"
            ) from err
        try:
            scorer = reasoning_gym.get_score_answer_fn(name)
        except (ValueError, KeyError, TypeError) as err:
            raise ReportedError(f"reasoning-gym has no task {name!r}: {err}") from err
        self._name, self._fork = name, Fork(self._score)
        self._scorer = cast("Callable[[str, Mapping[str, object]], float]", scorer)

    def describe(self) -> object:
        """Return nothing: there is nothing to report."""
        return None

    def __call__(self, request: object) -> list[Scored | None]:
        """Return the scores of (answers, entries, seconds of processor time); None beyond these."""
        answers, entries, seconds = cast(
            "tuple[Sequence[str], Sequence[Mapping[str, object]], float]", request
        )
        scores = []
        try:
            for answer, entry in zip(answers, entries, strict=True):
                scored = cast("Scored | None", self._fork.call(answer, entry, seconds=seconds))
                scores.append(None if scored is None else (scored[0], scored[1]))
        finally:
            # The next call gets a new fork, which no earlier answer can influence.
            self._fork.close()
        return scores

    def _score(self, answer: str, entry: Mapping[str, object]) -> Scored:
        if not is_harmless(self._name, answer):
            return 0.0, "failed"
        try:
            score = float(self._scorer(answer, entry))
        except Exception:  # noqa: BLE001 - scorers raise on answers that they do not expect
            return 0.0, "failed"
        return (score, "scored") if math.isfinite(score) else (0.0, "failed")


def is_harmless(name: str, answer: str) -> bool:
    """Return whether a scorer that evaluates answers may get this one."""
    if name in PARSED:
        words = re.findall(r"[A-Za-z]{2,}", answer)
        return _FORMULA.fullmatch(answer) is not None and all(map(_WORD.fullmatch, words))
    if name in EVALUATED and not _PLAIN.fullmatch(answer):
        try:
            ast.literal_eval(answer)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False
    return True
