"""Rule rewards for mathematics, which compare the response's final answer with the label."""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from lightrft.config import RewardOptions
from lightrft.rewards.process import (
    WorkerFailedError,
    WorkerPool,
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts
from lightrft.tools.rewards.labels import LabelReader

# The start of a box, an escaped character (an escaped brace does not count), or a brace.
_BRACE = re.compile(r"\\?\\(?:boxed|fbox)\s*+\{|\\.|[{}]", flags=re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_HASHES = re.compile(r"####\s*([^\n]+)")
_DECORATION = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$")
MAX_ANSWER_CHARACTERS = 1000
# Processor time of a comparison in the first round, and how many comparisons get more time after.
_SHORT_SECONDS, _MAX_LONG = 1.0, 8
# Share of the deadline that all answers of a round may take as processor time: answers of a model
# must not use up the deadline, which would end the run.
_ROUND_SHARE = 0.25
# Spaces without a meaning: `1 2` and `1 1/2` keep theirs.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, braces balanced; None without one.

    One pass over the text keeps the time linear for any answer.
    """
    unclosed: list[tuple[int, bool]] = []
    start = end = -1
    for match in _BRACE.finditer(text, 0, text.rfind("}") + 1):
        piece = match[0]
        if piece == "}":
            if unclosed:
                position, is_box = unclosed.pop()
                if is_box and position > start:
                    start, end = position, match.start()
        elif piece == "{" or len(piece) > 2:
            unclosed.append((match.end(), len(piece) > 2))
    return None if start < 0 else text[start:end].strip()


def last_hashes(text: str) -> str | None:
    """Return the text after the last `####`, GSM8K's answer mark, on its line; None without one."""
    answers = _HASHES.findall(text)
    return answers[-1].strip() if answers else None


def to_number(text: str) -> Fraction | None:
    """Return the number of a plain text such as `1,234.50`, `-3/4` or `$18`; None for others."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    parts = normalize(text).removesuffix("%").split("/")
    if len(parts) > 2 or not all(_is_number(part) for part in parts):
        return None
    numerator, denominator = [*(Fraction(part.replace(",", "")) for part in parts), Fraction(1)][:2]
    return numerator / denominator if denominator else None


def normalize(text: str) -> str:
    """Return the answer without spacing, currency signs and a final full stop."""
    for piece in _DECORATION:
        text = text.replace(piece, "")
    return _SPACE.sub("", text).removesuffix(".")


def quick_match(answer: str, gold: str) -> bool | None:
    """Return whether the answers are equal texts or plain numbers; None if a grader must decide.

    An empty answer equals nothing.
    """
    if not answer.strip():
        return False
    plain, plain_gold = normalize(answer), normalize(gold)
    if plain == plain_gold != "":
        return True
    if answer.endswith("%") != gold.endswith("%"):
        return None
    left, right = to_number(answer), to_number(gold)
    if left is None or right is None:
        return None
    return left == right


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(character.isdigit() for character in text)


_MEMORY_BYTES = 4 << 30
_TASK = WorkerTask("lightrft.tools.rewards.math_grader", "MathGrader", memory_bytes=_MEMORY_BYTES)


@dataclass(frozen=True, slots=True)
class MathRule:
    """Rule that finds the answers.

    Args:
        name: Name of the reward and of its component.
        find_answer: Function that returns the final answer of a response, or None.
        find_gold: Function that returns a label's reference answer; raises ValueError without one.
    """

    name: str
    find_answer: Callable[[str], str | None]
    find_gold: Callable[[str], str]


def _boxed_gold(label: str) -> str:
    boxed = last_boxed(label)
    gold = label.strip() if boxed is None else boxed
    if not gold:
        raise ValueError("the label is empty")
    if gold.startswith('{"') and gold.endswith("}"):  # JSON; sets of LaTeX have no quotes
        raise ValueError(
            f"expected a final answer, got an object {gold[:60]}: set --label_key to a column that "
            "has the answer itself"
        )
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


class MathReward(LabelReader[str]):
    """Reward of 1 if the response's final answer equals the label's, else 0.

    This process decides on equal texts and plain numbers; math-verify in worker processes decides
    on all others. Their limits are in processor time, so a busy machine changes no reward. An
    undecided answer is None; an answer of more than 1000 characters scores 0. Every answer of a
    call gets a second; then up to eight undecided ones get all of the time.

    Args:
        rule: Rule that finds the answers.
        grading_seconds: Processor time of one comparison.
        batch_seconds: Deadline of one call of `score` by the clock, starts of workers included. A
            call that misses it fails.
        num_workers: Largest number of grading processes; each starts when it is needed.
    """

    # One call uses all workers.
    parallel_calls = 1
    whole_batch = False

    def __init__(
        self,
        rule: MathRule,
        *,
        grading_seconds: float = 10.0,
        batch_seconds: float = 120.0,
        num_workers: int = 2,
    ) -> None:
        self.name = rule.name
        self._rule = rule
        self._grading_seconds = grading_seconds
        self._batch_seconds = batch_seconds
        self.workers = WorkerPool(_TASK, size=num_workers, name=rule.name)

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """Return the reward of each response; None if it is undecided."""
        del prompts, columns
        deadline = time.monotonic() + self._batch_seconds
        outcomes: list[bool | None] = [False] * len(responses)
        pairs: dict[int, tuple[str, str]] = {}
        for index, gold in enumerate(self.read_labels(labels)):
            answer = self._rule.find_answer(responses[index])
            if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
                continue
            outcomes[index] = quick_match(answer, gold)
            if outcomes[index] is None:
                pairs[index] = (answer, gold)
        for seconds, most in ((_SHORT_SECONDS, len(pairs)), (self._grading_seconds, _MAX_LONG)):
            undecided = [index for index in pairs if outcomes[index] is None][:most]
            share = _ROUND_SHARE * self._batch_seconds / max(1, len(undecided))
            limit = min(seconds, self._grading_seconds, share)
            matches = self.grade([pairs[index] for index in undecided], limit, deadline)
            for index, outcome in zip(undecided, matches, strict=True):
                outcomes[index] = outcome
        return [self._result(outcome) for outcome in outcomes]

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self.workers.close()

    def read_label(self, label: str) -> str:
        """Return the reference answer of a label."""
        return self._rule.find_gold(label)

    def grade(
        self, pairs: Sequence[tuple[str, str]], seconds: float, deadline: float
    ) -> list[bool | None]:
        """Return whether each answer equals its gold answer; None if that takes more seconds."""

        def grade(pair: tuple[str, str]) -> bool | None:
            with self.workers.idle() as worker:
                return self._grade_one(worker, pair, seconds, deadline)

        num_threads = min(len(self.workers.workers), len(pairs) or 1)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="reward") as threads:
            return list(threads.map(grade, pairs))

    def _grade_one(
        self, worker: WorkerProcess, pair: tuple[str, str], seconds: float, deadline: float
    ) -> bool | None:
        try:
            if not worker.is_running:
                worker.start(seconds=max(deadline - time.monotonic(), 0.001))
            left = deadline - time.monotonic()
            return cast("bool | None", worker.call((*pair, seconds), seconds=left))
        except (WorkerTimeoutError, WorkerFailedError) as err:
            if isinstance(err, WorkerTimeoutError) or time.monotonic() >= deadline:
                raise RewardError(
                    f"reward {self.name!r}: not all answers were compared within "
                    f"{self._batch_seconds:g} s: raise --reward_timeout_seconds"
                ) from err
            raise RewardError(
                f"reward {self.name!r} cannot grade the answer {pair[0][:200]!r} against "
                f"{pair[1][:200]!r}: {err}"
            ) from err

    def _result(self, outcome: bool | None) -> RewardResult | None:
        return None if outcome is None else RewardResult(outcome * 1.0, {self.name: outcome * 1.0})


def boxed_math(config: RewardOptions, name: str) -> MathReward:
    """Return the reward `boxed_math` of a run."""
    del name
    return MathReward(BOXED_MATH, batch_seconds=config.reward_timeout_seconds)


def gsm8k(config: RewardOptions, name: str) -> MathReward:
    """Return the reward `gsm8k` of a run."""
    del name
    return MathReward(GSM8K, batch_seconds=config.reward_timeout_seconds)
