"""Checks of a machine: each has a limit, a remedy, a deadline and one line of result."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from lightrft.kernels.names import first_line

DEADLINE_SECONDS = 20.0
# Set while the packages that most checks need are being imported.
importing = threading.Event()
LARGE_PACKAGES = ("torch", "transformers")


class Verdict(Enum):
    """Result of a check."""

    OK = "ok"
    BAD = "BAD"
    # The device or package of the check is missing.
    UNCHECKED = "--"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdict and text of a check.

    Args:
        verdict: Whether it is within the limit.
        text: Number or name that the check read, or why it read nothing.
    """

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """One question about this machine.

    Args:
        name: Name of the examined thing.
        limit: Expected value.
        remedy: Remedy if it is not so.
        examine: Callable that returns the result; an exception is a bad one.
        deadline_seconds: Deadline; a later answer is a bad result.
        needs_gpu: Whether nothing is checked where torch sees no GPU.
    """

    name: str
    limit: str
    remedy: str
    examine: Callable[[], CheckResult]
    deadline_seconds: float = DEADLINE_SECONDS
    needs_gpu: bool = False


def checked(is_good: bool, text: str) -> CheckResult:
    """Return a result that is within the limit or not."""
    return CheckResult(Verdict.OK if is_good else Verdict.BAD, text)


def unchecked(reason: str) -> CheckResult:
    """Return the result of a check that could not be made."""
    return CheckResult(Verdict.UNCHECKED, f"not checked: {reason}")


def without_gpu() -> CheckResult | None:
    """Return the result of checks that need a GPU where there is none."""
    import torch

    return None if torch.cuda.is_available() else unchecked("torch sees no GPU")


def check_imports() -> CheckResult:
    """Time the imports of large packages, which no other check should pay for."""
    begin = time.monotonic()
    importing.set()
    try:
        for name in LARGE_PACKAGES:
            importlib.import_module(name)
    finally:
        importing.clear()
    return checked(True, f"{', '.join(LARGE_PACKAGES)} in {time.monotonic() - begin:.1f} s")


def run_check(check: Check) -> CheckResult:
    """Return the result, at the latest after the check's deadline."""
    answers: list[CheckResult] = []

    def examine() -> None:
        try:
            answers.append((check.needs_gpu and without_gpu()) or check.examine())
        except Exception as error:  # noqa: BLE001 - whatever it is, the next check goes on
            answers.append(checked(False, f"{type(error).__name__}: {first_line(error)}"))

    # A name service or a driver that does not answer must not stop the rest.
    thread = threading.Thread(target=examine, name=f"check:{check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_seconds)
    if not answers and importing.is_set() and check.examine is not check_imports:
        return unchecked("the imports have not ended")
    return answers[0] if answers else checked(False, f"no answer in {check.deadline_seconds:g} s")


def line(check: Check, finding: CheckResult) -> str:
    """Return one line of the report; the remedy only where it is needed."""
    text = f"{finding.verdict.value:4}{check.name:22}{finding.text}"
    if finding.verdict is Verdict.UNCHECKED:
        return text
    text = f"{text}  (limit: {check.limit})"
    return text if finding.verdict is Verdict.OK else f"{text}\n      {check.remedy}"


def report(checks: Sequence[Check], write: Callable[[str], None]) -> list[Verdict]:
    """Run all checks and write a line for each, then the number of each verdict."""
    verdicts = []
    for check in checks:
        finding = run_check(check)
        write(line(check, finding))
        verdicts.append(finding.verdict)
    counts = {verdict: verdicts.count(verdict) for verdict in Verdict}
    write(
        f"{counts[Verdict.OK]} ok, {counts[Verdict.BAD]} bad, "
        f"{counts[Verdict.UNCHECKED]} could not be checked"
    )
    return verdicts
