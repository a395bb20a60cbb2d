"""The tests of a row, the program in an answer, and how the two are run together."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from lightrft.tools.rewards.sandbox import Ending

MAX_CODE_CHARACTERS = 100_000
_FENCES = ("```", "~~~")
# Runs in the sandbox. The answer is a module that is not `__main__`; what it prints goes nowhere.
# A test has passed when its line, which begins with a number of this run alone, is written.
_HARNESS = """
import json, os, sys, types
def run():
    job = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0); os.dup2(null, 1)
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(job["code"], "answer.py", "exec"), module.__dict__)
    for index, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"test {index}", "exec"), dict(module.__dict__))
        except BaseException as error:
            print(f"test {index}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(job["key"], index, file=results, flush=True)
run()
"""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of one row, of one kind.

    Args:
        asserts: Statements that run after the answer, and must not raise.
        pairs: Standard input, and the standard output that the answer must print.
    """

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.asserts) or len(self.pairs)


@dataclass(frozen=True, slots=True)
class CodeOutcome:
    """Result of running an answer with its tests.

    Args:
        num_passed: Tests.
        ended: How the last program ended that did not pass everything, or `passed`.
    """

    num_passed: int
    ended: Literal["passed", "failed", "timeout", "output", "deadline"]


def find_code(response: str) -> str:
    """The last fenced block of a text, closed or not; without one, the whole text."""
    block: list[str] | None = None
    last: list[str] | None = None
    fence = ""
    for line in response.splitlines():
        stripped = line.strip()
        if block is None:
            fence = next((mark for mark in _FENCES if stripped.startswith(mark)), "")
            if fence:
                block = last = []
        elif stripped == fence:
            block = None
        else:
            block.append(line)
    return response if last is None else "\n".join(last) + "\n"


def read_tests(label: str) -> CodeTests:
    """The tests of a label: see docs/data_formats.md.

    Raises:
        ValueError: It holds none; the message is one line.
    """
    try:
        found = json.loads(label)
    except (ValueError, RecursionError):
        found = [label]  # statements as they are
    if isinstance(found, dict) and {"inputs", "outputs"} <= found.keys():
        found = _paired(found)
    if not isinstance(found, list) or not found:
        raise ValueError(
            "expected tests: a list of statements such as 'assert add(1, 2) == 3', or of "
            f'{{"input": ..., "output": ...}}; got {label[:60]!r}'
        )
    if all(isinstance(test, str) and test.strip() for test in found):
        asserts = tuple(cast("list[str]", found))
        for test in asserts:
            _require_statement(test)
        return CodeTests(asserts=asserts)
    if all(isinstance(test, dict) and _is_pair(test) for test in found):
        return CodeTests(pairs=tuple((test["input"], test["output"]) for test in found))
    raise ValueError("every test must be a statement, or each an object of texts input and output")


def _paired(found: Mapping[str, object]) -> list[object]:
    """The tests of an object of inputs and outputs; raises a ValueError."""
    inputs, outputs = found["inputs"], found["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("'inputs' and 'outputs' of tests must be lists")
    if len(inputs) != len(outputs) or found.get("fn_name") is not None:
        raise ValueError("tests need as many outputs as inputs, and no fn_name")
    return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def run_tests(code: str, tests: CodeTests, run: Callable[[bytes, bytes], Ending]) -> CodeOutcome:
    """Runs the answer with its tests: statements in one program, inputs in one program each.

    Args:
        code: The answer's program.
        tests: Of the row.
        run: Runs a source with a standard input.
    """
    if tests.asserts:
        return _run_asserts(code, tests.asserts, run)
    num_passed = 0
    for given, expected in tests.pairs:
        ending = run(_encoded(code), _encoded(given))
        printed = ending.stdout.decode(errors="replace")
        is_right = ending.reason == "ended" and ending.returncode == 0
        if is_right and _lines(printed) == _lines(expected):
            num_passed += 1
            continue
        ended = _described(ending)
        if ended != "failed":  # more of it would take as long, or as much
            return CodeOutcome(num_passed, ended)
    return CodeOutcome(num_passed, "passed" if num_passed == len(tests) else "failed")


def _run_asserts(
    code: str, asserts: tuple[str, ...], run: Callable[[bytes, bytes], Ending]
) -> CodeOutcome:
    key = secrets.token_hex(16)
    job = json.dumps({"code": code, "tests": asserts, "key": key})
    ending = run(_HARNESS.encode(), job.encode())
    lines = set(ending.stdout.decode(errors="replace").splitlines())
    num_passed = sum(f"{key} {index}" in lines for index in range(len(asserts)))
    ended = _described(ending)
    if num_passed == len(asserts) and ended == "failed":
        return CodeOutcome(num_passed, "passed")
    return CodeOutcome(num_passed, ended)


def _described(ending: Ending) -> Literal["failed", "timeout", "output", "deadline"]:
    if ending.reason != "ended":
        return ending.reason
    # Killed from outside: by the limit of processor time, or for memory.
    return "timeout" if ending.returncode in (-9, 137, -24, 152) else "failed"


def _lines(text: str) -> list[str]:
    """The lines without spaces at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")


def _is_pair(test: dict[str, object]) -> bool:
    return isinstance(test.get("input"), str) and isinstance(test.get("output"), str)


def _require_statement(test: str) -> None:
    try:
        compile(test, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise ValueError(f"a test is no Python: {type(err).__name__} in {test[:60]!r}") from None
