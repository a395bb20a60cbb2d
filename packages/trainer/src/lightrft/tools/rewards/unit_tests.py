"""The reward of a program: it passes the tests of its row, in a sandbox."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lightrft.config import TrainConfig
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
from lightrft.tools.rewards.sandbox import Sandbox, SandboxError, SandboxLimits, num_slots

logger = logging.getLogger(__name__)
# Before a deadline, a program is started only if there is time for its start.
_START_SECONDS = 0.5


class UnitTestsReward:
    """1 if the answer's program passes all tests of the row's label, else 0.

    Components: `tests_passed` is the share of the tests, `timeout` is 1 where a program was ended
    for its time or memory, `suspicious` where it names what forged tests are made with. Without a
    sandbox that works it cannot be made.

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

    def __init__(self, config: TrainConfig, name: str = "unit_tests") -> None:
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
    ) -> list[RewardResult]:
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
        if not codes:
            return []
        run_one = partial(self._run_one, deadline=deadline)
        with ThreadPoolExecutor(self._num_slots, thread_name_prefix="sandbox") as threads:
            try:
                return list(threads.map(run_one, codes, tests))
            except SandboxError as err:
                raise RewardError(f"reward {self.name!r}: {err}") from err
            except KeyboardInterrupt:
                self._sandbox.stop()
                raise
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _run_one(self, code: str, tests: CodeTests, *, deadline: float) -> CodeOutcome:
        if not code.strip() or len(code) > MAX_CODE_CHARACTERS:
            return CodeOutcome(0, "failed")
        if deadline - time.monotonic() < _START_SECONDS:
            tested = CodeOutcome(0, "deadline")
        else:
            run = partial(self._sandbox.run, deadline=deadline)
            tested = run_tests(code, tests, lambda source, given: run(source, stdin=given))
        if tested.ended == "deadline":
            raise RewardError(
                f"reward {self.name!r}: not all programs ran within {self._seconds:g} s: raise "
                "--reward_timeout_seconds, or lower --test_timeout_seconds"
            )
        return tested

    def _result(self, code: str, tests: CodeTests, tested: CodeOutcome) -> RewardResult:
        reward = float(tested.ended == "passed")
        components = {
            self.name: reward,
            "tests_passed": tested.num_passed / len(tests),
            "timeout": float(tested.ended == "timeout"),
            "suspicious": float(is_suspicious(code)),
        }
        return RewardResult(reward, components)
