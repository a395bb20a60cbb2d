"""Reward of a program that passes the tests of its row, in a sandbox."""

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
from lightrft.tools.rewards.labels import LabelReader
from lightrft.tools.rewards.sandbox import (
    Ending,
    Sandbox,
    SandboxError,
    SandboxLimits,
    num_slots,
)

logger = logging.getLogger(__name__)
# A program starts only if this much time is left before the deadline.
_START_SECONDS = 0.5
# The clock ended these programs, which says nothing about their quality.
_LATE = ("undecided", "deadline")


class UnitTestsReward(LabelReader[CodeTests]):
    """Reward of 1 if the answer's program passes all tests of the row's label, else 0.

    Components: `tests_passed` is the share of passed tests; `timeout` is 1 if a program was ended
    for its time or memory; `suspicious` is 1 if it uses names that forge tests. A program that
    runs until the deadline of the call is undecided.

    Args:
        config: Options `sandbox`, `test_timeout_seconds` and `reward_timeout_seconds`, the deadline
            of one call.
        name: Name of the reward and of its component.

    Raises:
        ConfigError: No sandbox works here.
    """

    # One call uses all slots.
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
        """Return the reward of each program; None if it is undecided."""
        del prompts, columns
        deadline = time.monotonic() + self._seconds
        tests = self.read_labels(labels)
        codes = [find_code(text) for text in responses]
        outcomes = self._run_all(codes, tests, deadline)
        return [self._result(*row) for row in zip(codes, tests, outcomes, strict=True)]

    def read_label(self, label: str) -> CodeTests:
        """Return the tests of a label; see docs/data_formats.md."""
        return read_tests(label)

    def close(self) -> None:
        """Remove the sandbox's folder; may be called twice."""
        self._sandbox.close()

    def _run_all(
        self, codes: Sequence[str], tests: Sequence[CodeTests], deadline: float
    ) -> list[CodeOutcome]:
        """Run every answer; those that keep a slot too long run again after all others."""
        if not codes:
            return []
        with ThreadPoolExecutor(self._num_slots, thread_name_prefix="sandbox") as threads:
            try:
                has_queue = len(codes) > self._num_slots
                seconds = self._sandbox.limits.total_seconds if has_queue else math.inf
                run_one = partial(self._run_one, deadline=deadline)
                outcomes = list(threads.map(partial(run_one, seconds=seconds), codes, tests))
                if has_queue:
                    cut = [at for at, each in enumerate(outcomes) if each.ended == "undecided"]
                    again = threads.map(lambda at: run_one(codes[at], tests[at]), cut)
                    for at, each in zip(cut, again, strict=True):
                        outcomes[at] = outcomes[at] if each.ended in _LATE else each
            except SandboxError as err:
                raise RewardError(f"reward {self.name!r}: {err}") from err
            except KeyboardInterrupt:
                self._sandbox.stop()
                raise
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        self._require_time(outcomes)
        return outcomes

    def _run_one(
        self, code: str, tests: CodeTests, *, deadline: float, seconds: float = math.inf
    ) -> CodeOutcome:
        """Run one answer; none of its programs keeps a slot for more than `seconds`.

        The outcome is undecided if a program had all the time of its limits.
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

    def _require_time(self, outcomes: Sequence[CodeOutcome]) -> None:
        """Raise a RewardError if programs had too little time and none had all of its time."""
        num_late = sum(each.ended in _LATE for each in outcomes)
        if not num_late:
            return
        if all(each.ended != "undecided" for each in outcomes):
            raise RewardError(
                f"reward {self.name!r}: not all programs ran within {self._seconds:g} s: raise "
                "--reward_timeout_seconds, or lower --test_timeout_seconds"
            )
        logger.warning(
            "%s: %d of %d programs had not ended after %g s and are left out",
            *(self.name, num_late, len(outcomes), self._seconds),
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
