"""The reward of a program: it passes the tests of its row, in a sandbox."""

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from lightrft.config import RewardOptions
from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts
from lightrft.tools.rewards.code_tests import (
    MAX_CODE_CHARACTERS,
    CodeOutcome,
    CodeTests,
    find_code,
    is_suspicious,
    read_tests,
    run_tests,
)
from lightrft.tools.rewards.sandbox import (
    Ending,
    Sandbox,
    SandboxError,
    SandboxLimits,
    num_slots,
)

logger = logging.getLogger(__name__)
# Before a deadline, a program is started only if there is time for its start.
_START_SECONDS = 0.5
# The clock ended them, which says nothing of what they are worth.
_LATE = ("undecided", "deadline")


class UnitTestsReward:
    """1 if the answer's program passes all tests of the row's label, else 0.

    Components: `tests_passed` is the share of the tests, `timeout` is 1 where a program was ended
    for its time or memory, `suspicious` where it names what forged tests are made with. One that
    runs until the deadline of the call is undecided. Without a sandbox that works it cannot be
    made.

    Args:
        config: Its `sandbox`, `test_timeout_seconds` and `reward_timeout_seconds`, the deadline of
            one call.
        name: Of the reward and of its component.

    Raises:
        ConfigError: No sandbox works here.
    """

    needs_labels = True
    # One call has all the slots.
    parallel_calls = 1
    whole_batch = False

    def __init__(self, config: RewardOptions, name: str = "unit_tests") -> None:
        self.name = name
        self._seconds = config.reward_timeout_seconds
        self._sandbox = Sandbox(
            config.sandbox, SandboxLimits(cpu_seconds=config.test_timeout_seconds)
        )
        self._num_slots = num_slots()
        if config.sandbox == "unsafe":
            logger.warning(
                "unit_tests: --sandbox unsafe: programs of the model run on this machine with "
                "limits of time and memory, but can use the network, read files and leave "
                "processes behind"
            )

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """See `RewardFunction.score`."""
        del prompts, columns
        deadline = time.monotonic() + self._seconds
        tests = [self._tests(index, label) for index, label in enumerate(labels)]
        codes = [find_code(text) for text in responses]
        found = self._run_all(codes, tests, deadline)
        return [self._result(*row) for row in zip(codes, tests, found, strict=True)]

    def label_problem(self, label: str | None) -> str | None:
        """The reason why no response to a row with this label can be right; None if one can."""
        if label is None:
            return "the row has no label: set --label_key"
        try:
            read_tests(label)
        except ValueError as err:
            return str(err)
        return None

    def close(self) -> None:
        """Removes the sandbox's folder; may be called twice."""
        self._sandbox.close()

    def _tests(self, index: int, label: str | None) -> CodeTests:
        problem = self.label_problem(label)
        if label is None or problem is not None:
            raise RewardError(f"reward {self.name!r}, label of sample {index}: {problem}")
        return read_tests(label)

    def _run_all(
        self, codes: Sequence[str], tests: Sequence[CodeTests], deadline: float
    ) -> list[CodeOutcome]:
        """Runs every answer; one that keeps its place waits with its rest until all others ran."""
        if not codes:
            return []
        with ThreadPoolExecutor(self._num_slots, thread_name_prefix="sandbox") as threads:
            try:
                has_queue = len(codes) > self._num_slots
                seconds = self._sandbox.limits.total_seconds if has_queue else math.inf
                run_one = partial(self._run_one, deadline=deadline)
                found = list(threads.map(partial(run_one, seconds=seconds), codes, tests))
                if has_queue:
                    cut = [at for at, each in enumerate(found) if each.ended == "undecided"]
                    again = threads.map(lambda at: run_one(codes[at], tests[at]), cut)
                    for at, each in zip(cut, again, strict=True):
                        found[at] = found[at] if each.ended in _LATE else each
            except SandboxError as err:
                raise RewardError(f"reward {self.name!r}: {err}") from err
            except KeyboardInterrupt:
                self._sandbox.stop()
                raise
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        self._require_time(found)
        return found

    def _run_one(
        self, code: str, tests: CodeTests, *, deadline: float, seconds: float = math.inf
    ) -> CodeOutcome:
        """Result of one answer, of which no program keeps its place for more than so many seconds.

        It is undecided where one had all the time of its limits.
        """
        if not code.strip() or len(code) > MAX_CODE_CHARACTERS:
            return CodeOutcome(0, "failed")
        begun = time.monotonic()
        if deadline - begun < _START_SECONDS:
            return CodeOutcome(0, "deadline")

        def run(source: bytes, stdin: bytes) -> Ending:
            nonlocal begun
            begun = time.monotonic()
            return self._sandbox.run(source, stdin=stdin, deadline=min(deadline, begun + seconds))

        tested = run_tests(code, tests, run)
        lasted = time.monotonic() - begun
        if tested.ended == "deadline" and lasted >= self._sandbox.limits.total_seconds:
            return replace(tested, ended="undecided")
        return tested

    def _require_time(self, found: Sequence[CodeOutcome]) -> None:
        """Raises a RewardError where programs had too little time, and none had too much."""
        num_late = sum(each.ended in _LATE for each in found)
        if not num_late:
            return
        if all(each.ended != "undecided" for each in found):
            raise RewardError(
                f"reward {self.name!r}: not all programs ran within {self._seconds:g} s: raise "
                "--reward_timeout_seconds, or lower --test_timeout_seconds"
            )
        logger.warning(
            "%s: %d of %d programs had not ended after %g s and are left out",
            *(self.name, num_late, len(found), self._seconds),
        )

    def _result(self, code: str, tests: CodeTests, tested: CodeOutcome) -> RewardResult | None:
        if tested.ended in _LATE:
            return None
        reward = float(tested.ended == "passed")
        components = {
            self.name: reward,
            "tests_passed": tested.num_passed / len(tests),
            "timeout": float(tested.ended == "timeout"),
            "suspicious": float(is_suspicious(code)),
        }
        return RewardResult(reward, components)
