"""Rule rewards for mathematics: the final answer of the response against the label."""

import queue
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
    WorkerProcess,
    WorkerTask,
    WorkerTimeoutError,
)
from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts

# The start of a box, an escaped character (of which a brace is no brace), or a brace.
_BRACE = re.compile(r"\\?\\(?:boxed|fbox)\s*+\{|\\.|[{}]", flags=re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_HASHES = re.compile(r"####\s*([^\n]+)")
_DECORATION = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$")
MAX_ANSWER_CHARACTERS = 1000
# Of processor time: every answer gets the short one; then some of those that need more the long.
_SHORT_SECONDS, _MAX_LONG = 1.0, 8
# Of the deadline by the clock, in processor time of all answers of a round: what a model writes
# must not use up the deadline, which would end the run.
_ROUND_SHARE = 0.25
# Spaces that separate nothing: `1 2` and `1 1/2` keep theirs.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, braces balanced; None if there is none.

    One pass over the text: what a model writes must not decide how long this takes.
    """
    unclosed: list[tuple[int, bool]] = []
    start = end = -1
    for found in _BRACE.finditer(text, 0, text.rfind("}") + 1):
        piece = found[0]
        if piece == "}":
            if unclosed:
                position, is_box = unclosed.pop()
                if is_box and position > start:
                    start, end = position, found.start()
        elif piece == "{" or len(piece) > 2:
            unclosed.append((found.end(), len(piece) > 2))
    return None if start < 0 else text[start:end].strip()


def last_hashes(text: str) -> str | None:
    """The text after the last `####` on its line, the answer mark of GSM8K; None without one."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def to_number(text: str) -> Fraction | None:
    """The number a plain text such as `1,234.50`, `-3/4` or `$18` stands for; None otherwise."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
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
    """Return whether the answers are equal as text or both plain numbers; None takes a grader.

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
    """Places of the answers.

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
    if gold.startswith('{"') and gold.endswith("}"):  # of JSON; sets of LaTeX have no such mark
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


class MathReward:
    """1 if the response's final answer equals the label's, else 0; sees only the response.

    Equal text and plain numbers are decided here; everything else by math-verify in
    worker processes, which get processor time, so that a busy machine changes no reward. What they
    cannot decide in it is None; an answer of more than 1000 characters is no final answer and
    scores 0. Every answer of a call is tried for a second before
    eight of those that need more get all of the time.

    Args:
        rule: Where the answers stand.
        grading_seconds: Processor time of one comparison.
        batch_seconds: Deadline of one call of `score` by the clock, starts of workers included. A
            call that does not keep it has failed.
        num_workers: Grading processes at most; none starts before it is needed.
    """

    needs_labels = True
    # One call has all the workers.
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
        self.workers = [WorkerProcess(_TASK, name=rule.name) for _ in range(num_workers)]

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """See `RewardFunction.score`."""
        del prompts, columns
        deadline = time.monotonic() + self._batch_seconds
        outcomes: list[bool | None] = [False] * len(responses)
        pairs: dict[int, tuple[str, str]] = {}
        for index, (response, label) in enumerate(zip(responses, labels, strict=True)):
            answer, gold = self._rule.find_answer(response), self._gold(index, label)
            if answer is None or len(answer) > MAX_ANSWER_CHARACTERS:
                continue
            outcomes[index] = quick_match(answer, gold)
            if outcomes[index] is None:
                pairs[index] = (answer, gold)
        for seconds, most in ((_SHORT_SECONDS, len(pairs)), (self._grading_seconds, _MAX_LONG)):
            undecided = [index for index in pairs if outcomes[index] is None][:most]
            share = _ROUND_SHARE * self._batch_seconds / max(1, len(undecided))
            limit = min(seconds, self._grading_seconds, share)
            found = self.grade([pairs[index] for index in undecided], limit, deadline)
            for index, outcome in zip(undecided, found, strict=True):
                outcomes[index] = outcome
        return [self._result(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Ends the worker processes; may be called twice."""
        for worker in self.workers:
            worker.close()

    def label_problem(self, label: str | None) -> str | None:
        """The reason why no response to a row with this label can be right; None if one can."""
        if label is None:
            return "the row has no label: set --label_key"
        try:
            self._rule.find_gold(label)
        except ValueError as err:
            return str(err)
        return None

    def _gold(self, index: int, label: str | None) -> str:
        problem = self.label_problem(label)
        if label is None or problem is not None:
            raise RewardError(f"reward {self.name!r}, label of sample {index}: {problem}")
        return self._rule.find_gold(label)

    def grade(
        self, pairs: Sequence[tuple[str, str]], seconds: float, deadline: float
    ) -> list[bool | None]:
        """Whether each answer equals its gold answer; None where that takes more seconds."""
        if not pairs:
            return []
        idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self.workers:
            idle.put(worker)

        def grade(pair: tuple[str, str]) -> bool | None:
            worker = idle.get()
            try:
                return self._grade_one(worker, pair, seconds, deadline)
            finally:
                idle.put(worker)

        num_threads = min(len(self.workers), len(pairs))
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
    """The reward `boxed_math` of a run."""
    del name
    return MathReward(BOXED_MATH, batch_seconds=config.reward_timeout_seconds)


def gsm8k(config: RewardOptions, name: str) -> MathReward:
    """The reward `gsm8k` of a run."""
    del name
    return MathReward(GSM8K, batch_seconds=config.reward_timeout_seconds)
