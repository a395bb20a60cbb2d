"""Checks of a machine: each has a limit, a remedy and a deadline, and one line of result."""

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
    # Without the device or package that it is about.
    UNCHECKED = "--"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdict and text of a check.

    Args:
        verdict: Whether it is within the limit.
        text: The number or name that was found, or why nothing could be.
    """

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """One question about this machine.

    Args:
        name: Of the examined thing.
        limit: What is expected.
        remedy: What to do if it is not so.
        examine: Finds out; an exception is a bad finding.
        deadline_seconds: An answer that takes longer is a bad finding.
        needs_gpu: Nothing is checked where torch sees none.
    """

    name: str
    limit: str
    remedy: str
    examine: Callable[[], CheckResult]
    deadline_seconds: float = DEADLINE_SECONDS
    needs_gpu: bool = False


def found(is_good: bool, text: str) -> CheckResult:
    """Within the limit or not."""
    return CheckResult(Verdict.OK if is_good else Verdict.BAD, text)


def unchecked(reason: str) -> CheckResult:
    """Nothing could be found out."""
    return CheckResult(Verdict.UNCHECKED, f"not checked: {reason}")


def without_gpu() -> CheckResult | None:
    """The finding of checks that need a GPU where there is none."""
    import torch

    return None if torch.cuda.is_available() else unchecked("torch sees no GPU")


def check_imports() -> CheckResult:
    """Seconds that the large packages take, which no other check is to be charged with."""
    begin = time.monotonic()
    importing.set()
    try:
        for name in LARGE_PACKAGES:
            importlib.import_module(name)
    finally:
        importing.clear()
    return found(True, f"{', '.join(LARGE_PACKAGES)} in {time.monotonic() - begin:.1f} s")


def run_check(check: Check) -> CheckResult:
    """The finding, at the latest after the check's deadline."""
    answers: list[CheckResult] = []

    def examine() -> None:
        try:
            answers.append((check.needs_gpu and without_gpu()) or check.examine())
        except Exception as error:  # noqa: BLE001 - whatever it is, the next check goes on
            answers.append(found(False, f"{type(error).__name__}: {first_line(error)}"))

    # A name service or a driver that does not answer must not stop the rest.
    thread = threading.Thread(target=examine, name=f"check:{check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_seconds)
    if not answers and importing.is_set() and check.examine is not check_imports:
        return unchecked("the imports have not ended")
    return answers[0] if answers else found(False, f"no answer in {check.deadline_seconds:g} s")


def line(check: Check, finding: CheckResult) -> str:
    """One line of the report; the remedy only where it is needed."""
    text = f"{finding.verdict.value:4}{check.name:22}{finding.text}"
    if finding.verdict is Verdict.UNCHECKED:
        return text
    text = f"{text}  (limit: {check.limit})"
    return text if finding.verdict is Verdict.OK else f"{text}\n      {check.remedy}"


def report(checks: Sequence[Check], write: Callable[[str], None]) -> list[Verdict]:
    """Carries out all checks and writes a line for each, then how many are what."""
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
