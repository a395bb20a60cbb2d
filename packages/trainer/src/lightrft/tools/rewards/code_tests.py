"""Tests of a row, the program in an answer, and the run of both together."""

import ast
import hashlib
import inspect
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightrft.tools.rewards.sandbox import Ending

MAX_CODE_CHARACTERS = 100_000
_FENCES = ("```", "~~~")
_KEY_BYTES = 32
# Names that few programs need unless they look for their tests.
_SUSPICIOUS = re.compile(r"_getframe|_current_frames|\bgc\b|\bbuiltins\b|__builtins__|__eq__")
_COLLECTIONS: Mapping[str, Callable[[Any], object]] = {
    "set": set,
    "frozenset": frozenset,
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "sorted": sorted,
}


def canonical(value: object) -> str:
    """Return a text that is the same for equal values of built-in types.

    Classes that define their `__eq__` cannot influence it. It also runs in the sandbox, on any
    Python 3.

    Raises:
        TypeError: The value has another type.
    """
    from collections.abc import Set

    if value is None:
        return "None"
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, (bytes, bytearray)):
        return "b" + bytes(value).hex()
    if isinstance(value, complex):
        if value.imag:
            return "c" + canonical(value.real) + canonical(value.imag)
        value = value.real
    if isinstance(value, float) and value - value != 0:
        return f"{float(value)!r}"
    if hasattr(value, "as_integer_ratio"):
        numerator, denominator = value.as_integer_ratio()
        return f"{numerator:x}/{denominator:x}"
    if isinstance(value, (list, tuple)):
        name = "list" if isinstance(value, list) else "tuple"
        return name + "(" + ",".join(map(canonical, value)) + ")"
    if isinstance(value, Set):
        return "set(" + ",".join(sorted(map(canonical, value))) + ")"
    if isinstance(value, dict):
        pairs = [canonical(key) + ":" + canonical(item) for key, item in value.items()]
        return "dict(" + ",".join(sorted(pairs)) + ")"
    raise TypeError("no value of Python's own types")


# Runs in the sandbox. The answer becomes a module other than `__main__`; its output is discarded.
# If a test compares with a constant, the sandbox sends a hash of the answer's value, and the
# comparison happens outside: nothing inside knows the right value. Any other test passes by writing
# its key, which the sandbox reads only after the test ran.
_HARNESS = f"""
import hashlib, json, os, sys, types
{inspect.getsource(canonical)}
def run():
    build, execute, evaluate, show = compile, exec, eval, print
    hashed, read = hashlib.sha256, os.read
    requests, results = os.dup(0), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0); os.dup2(null, 1)
    size, text = int(read(requests, 8), 16), b""
    while len(text) < size:
        text += read(requests, size - len(text))
    code, tests = json.loads(text)
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    execute(build(code, "answer.py", "exec"), module.__dict__)
    for index, (kind, test) in enumerate(tests):
        line = None
        try:
            made = build(test, "test", kind)
            if kind == "eval":
                value = evaluate(made, dict(module.__dict__))
                line = hashed(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()
            else:
                execute(made, dict(module.__dict__))
                line = ""
        except BaseException as error:
            show("test", index, type(error).__name__, error, file=sys.stderr)
        if kind == "exec":
            key = read(requests, {_KEY_BYTES}).decode()
            line = key if line == "" else None
        if line:
            show(index, line, file=results, flush=True)
run()
"""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests of one row, all of one kind.

    Args:
        asserts: Statements that run after the answer and must not raise.
        pairs: Standard inputs with the standard outputs that the answer must print.
    """

    asserts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.asserts) or len(self.pairs)


@dataclass(frozen=True, slots=True)
class CodeOutcome:
    """Result of running an answer with its tests.

    Args:
        num_passed: Number of tests that passed.
        ended: `passed`, or the end of the last program that did not pass everything; `undecided`
            if the caller's deadline ended it after all the time of its limits.
    """

    num_passed: int
    ended: Literal["passed", "failed", "timeout", "output", "deadline", "undecided"]


def is_suspicious(code: str) -> bool:
    """Return whether a program uses names that forge tests; some honest ones do, too."""
    return _SUSPICIOUS.search(code) is not None


def find_code(response: str) -> str:
    """Return the last fenced block of a text, closed or not; without one, the whole text."""
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
    """Return the tests of a label; see docs/data_formats.md.

    Raises:
        ValueError: The label holds no tests; the message is one line.
    """
    try:
        tests = json.loads(label)
    except (ValueError, RecursionError):
        tests = [label]  # statements as they are
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        tests = _paired(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError(
            "expected tests: a list of statements such as 'assert add(1, 2) == 3', or of "
            f'{{"input": ..., "output": ...}}; got {label[:60]!r}'
        )
    if all(isinstance(test, str) and test.strip() for test in tests):
        asserts = tuple(cast("list[str]", tests))
        for test in asserts:
            try:
                compile(test, "test", "exec")
            except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
                raise ValueError(
                    f"a test is no Python: {type(err).__name__} in {test[:60]!r}"
                ) from None
        return CodeTests(asserts=asserts)
    if all(
        isinstance(test, dict) and {type(test.get("input")), type(test.get("output"))} == {str}
        for test in tests
    ):
        return CodeTests(pairs=tuple((test["input"], test["output"]) for test in tests))
    raise ValueError("every test must be a statement, or each an object of texts input and output")


def _paired(pairs: Mapping[str, object]) -> list[object]:
    """Return the tests of an object of inputs and outputs, or raise a ValueError."""
    inputs, outputs = pairs["inputs"], pairs["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("'inputs' and 'outputs' of tests must be lists")
    if len(inputs) != len(outputs) or pairs.get("fn_name") is not None:
        raise ValueError("tests need as many outputs as inputs, and no fn_name")
    return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def run_tests(code: str, tests: CodeTests, run: Callable[[bytes, bytes], Ending]) -> CodeOutcome:
    """Run the answer with its tests: statements in one program, inputs in one program each.

    Args:
        code: Program of the answer.
        tests: Tests of the row.
        run: Function that runs a source with a standard input.
    """
    if tests.asserts:
        return _run_asserts(code, tests.asserts, run)
    num_passed = 0
    for stdin, expected in tests.pairs:
        ending = run(_encoded(code), _encoded(stdin))
        printed = ending.stdout.decode(errors="replace")
        is_right = ending.reason == "ended" and ending.returncode == 0
        if is_right and _lines(printed) == _lines(expected):
            num_passed += 1
            continue
        ended = _described(ending)
        if ended != "failed":  # further tests would hit the same limit
            return CodeOutcome(num_passed, ended)
    return CodeOutcome(num_passed, "passed" if num_passed == len(tests) else "failed")


def _run_asserts(
    code: str, asserts: tuple[str, ...], run: Callable[[bytes, bytes], Ending]
) -> CodeOutcome:
    compared = [_comparison(test) for test in asserts]
    keys = [secrets.token_hex(_KEY_BYTES // 2) for pair in compared if pair is None]
    tests = [
        ("exec", test) if pair is None else ("eval", pair[0])
        for test, pair in zip(asserts, compared, strict=True)
    ]
    job = _encoded(json.dumps([code, tests]))
    ending = run(_HARNESS.encode(), b"%08x" % len(job) + job + "".join(keys).encode())
    lines = Counter(ending.stdout.decode(errors="replace").splitlines())
    numbers = Counter(line.partition(" ")[0] for line in lines.elements())
    unused_keys = iter(keys)
    expected = [next(unused_keys) if pair is None else pair[1] for pair in compared]
    # A test with several lines fails: its program was guessing.
    num_passed = sum(
        lines[f"{index} {line}"] == numbers[str(index)] == 1 for index, line in enumerate(expected)
    )
    ended = _described(ending)
    if num_passed == len(asserts) and ended == "failed":
        return CodeOutcome(num_passed, "passed")
    return CodeOutcome(num_passed, ended)


def _comparison(test: str) -> tuple[str, str] | None:
    """Return the expression and the constant's hash of `assert EXPRESSION == CONSTANT`, or None."""
    statements = ast.parse(test).body
    checked = statements[0].test if isinstance(statements[0], ast.Assert) else None
    if len(statements) > 1 or not isinstance(checked, ast.Compare) or len(checked.ops) > 1:
        return None
    if not isinstance(checked.ops[0], ast.Eq):
        return None
    for expression, constant in ((0, 1), (1, 0)):
        sides = (checked.left, checked.comparators[0])
        try:
            text = canonical(_constant(sides[constant]))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return ast.unparse(sides[expression]), digest
    return None


def _constant(node: ast.expr) -> object:
    """Return the value of a literal or of a collection made of one, or raise a ValueError."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _COLLECTIONS.get(node.func.id)
        if make is not None and len(node.args) == 1 and not node.keywords:
            return make(ast.literal_eval(node.args[0]))
    return cast("object", ast.literal_eval(node))


def _described(ending: Ending) -> Literal["failed", "timeout", "output", "deadline"]:
    if ending.reason != "ended":
        return "timeout" if ending.reason == "memory" else ending.reason
    # Killed at the limit of processor time, or for its memory.
    return "timeout" if ending.returncode in (-9, 137, -24, 152) else "failed"


def _lines(text: str) -> list[str]:
    """Return the lines without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
