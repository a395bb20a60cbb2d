"""Rule rewards for mathematics: the final answer of the response against the label."""

import logging
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_HASHES = re.compile(r"####\s*([^\n]+)")
_DECORATION = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$")
# Spaces that separate nothing: `1 2` and `1 1/2` keep theirs.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, braces balanced; None if there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        content = _balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def last_hashes(text: str) -> str | None:
    """What follows the last `####` on its line, the answer mark of GSM8K; None without one."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def to_number(text: str) -> Fraction | None:
    """The number a plain text such as `1,234.50`, `-3/4` or `$18` stands for; None otherwise."""
    parts = normalize(text).removesuffix("%").split("/")
    if len(parts) > 2 or not all(_is_number(part) for part in parts):
        return None
    numerator, denominator = [*(Fraction(part.replace(",", "")) for part in parts), Fraction(1)][:2]
    return numerator / denominator if denominator else None


def normalize(text: str) -> str:
    """The answer without spacing, currency signs and a final full stop."""
    for piece in _DECORATION:
        text = text.replace(piece, "")
    return _SPACE.sub("", text).removesuffix(".")


def quick_match(answer: str, gold: str) -> bool | None:
    """True or False where the answers are equal as text or both plain numbers; else None.

    An empty answer equals nothing.
    """
    if not answer.strip():
        return False
    if normalize(answer) == normalize(gold) != "":
        return True
    if answer.endswith("%") != gold.endswith("%"):
        return None
    left, right = to_number(answer), to_number(gold)
    return None if left is None or right is None else left == right


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(character.isdigit() for character in text)


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # an escaped brace is not a brace
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None


MAX_ANSWER_CHARACTERS = 1000
_MEMORY_BYTES = 4 << 30
_TASK = WorkerTask("lightrft.rewards.math_rules", "MathGrader", memory_bytes=_MEMORY_BYTES)


@dataclass(frozen=True, slots=True)
class MathRule:
    """Where the answers stand.

    Args:
        name: Name of the reward and of its component.
        find_answer: The final answer of a response, or None.
        find_gold: The reference answer of a label; raises ValueError if it holds none.
    """

    name: str
    find_answer: Callable[[str], str | None]
    find_gold: Callable[[str], str]


def _boxed_gold(label: str) -> str:
    boxed = last_boxed(label)
    gold = label.strip() if boxed is None else boxed
    if not gold:
        raise ValueError("the label is empty")
    if boxed is None and ("####" in gold or "\n" in gold):
        # A worked solution equals no answer: every reward would be 0.
        raise ValueError(
            "expected a final answer or text with \\boxed{...}, got a worked solution "
            f"{gold[-60:]!r}; for the '#### number' of GSM8K use the reward gsm8k"
        )
    return gold


def _gsm8k_gold(label: str) -> str:
    gold = last_hashes(label) or label.strip()
    if to_number(gold) is None:
        raise ValueError(f"expected a number, or text that ends in '#### number', got {label!r}")
    return gold


def _gsm8k_answer(response: str) -> str | None:
    boxed = last_boxed(response)
    return last_hashes(response) if boxed is None else boxed


BOXED_MATH = MathRule("boxed_math", last_boxed, _boxed_gold)
GSM8K = MathRule("gsm8k", _gsm8k_answer, _gsm8k_gold)


class MathReward:
    """1 if the response's final answer equals the label's, else 0; sees only the response.

    Equal text and plain numbers are decided here; everything else by math-verify in worker
    processes. An answer that the grader cannot decide within the deadline scores 0 and counts in
    the component `timeout`; one of more than 1000 characters is no final answer and scores 0.

    Args:
        rule: Where the answers stand.
        grading_seconds: Deadline of one comparison.
        num_workers: Grading processes at most; none starts before it is needed.
    """

    needs_labels = True

    def __init__(
        self, rule: MathRule, *, grading_seconds: float = 10.0, num_workers: int = 2
    ) -> None:
        self.name = rule.name
        self._rule = rule
        self._seconds = grading_seconds
        self._workers = [WorkerProcess(_TASK) for _ in range(num_workers)]

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult]:
        """See `RewardFunction.score`."""
        del prompts, columns
        outcomes: list[bool | Literal["timeout"]] = [False] * len(responses)
        undecided: list[tuple[int, str, str]] = []
        for index, (response, label) in enumerate(zip(responses, labels, strict=True)):
            answer, gold = self._rule.find_answer(response), self._gold(index, label)
            if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
                continue
            match = quick_match(answer, gold)
            if match is None:
                undecided.append((index, answer, gold))
            outcomes[index] = bool(match)
        for index, outcome in self._grade_all(undecided):
            outcomes[index] = outcome
        return [self._result(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        for worker in self._workers:
            worker.close()

    def _gold(self, index: int, label: str | None) -> str:
        if label is None:
            raise RewardError(
                f"reward {self.name!r} needs a label and sample {index} has none: set --label_key "
                "to the column with the reference answer"
            )
        try:
            return self._rule.find_gold(label)
        except ValueError as err:
            raise RewardError(f"reward {self.name!r}, label of sample {index}: {err}") from err

    def _grade_all(
        self, pairs: Sequence[tuple[int, str, str]]
    ) -> list[tuple[int, bool | Literal["timeout"]]]:
        if not pairs:
            return []
        idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def grade(pair: tuple[int, str, str]) -> tuple[int, bool | Literal["timeout"]]:
            worker, (index, answer, gold) = idle.get(), pair
            try:
                return index, bool(worker.call((answer, gold), seconds=self._seconds))
            except WorkerTimeoutError:
                return index, "timeout"
            except WorkerFailedError as err:
                raise RewardError(
                    f"reward {self.name!r} failed on sample {index}, answer {answer[:200]!r} "
                    f"against {gold!r}: {err}"
                ) from err
            finally:
                idle.put(worker)

        num_threads = min(len(self._workers), len(pairs))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="reward") as threads:
            return list(threads.map(grade, pairs))

    def _result(self, outcome: bool | Literal["timeout"]) -> RewardResult:
        score = 1.0 if outcome is True else 0.0
        return RewardResult(score, {self.name: score, "timeout": float(outcome == "timeout")})


class MathGrader:
    """Compares two answers in LaTeX or plain notation by their mathematical value, in a worker.

    math-verify limits its time by SIGALRM, which works in a main thread only and does not stop
    native code; here its limits are off and the parent kills the worker at the deadline.
    """

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
