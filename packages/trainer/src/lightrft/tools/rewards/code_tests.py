"""The tests of a row, the program in an answer, and how the two are run together."""

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
# What a program has no business with, unless it looks for its tests.
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
    """A text that equal values of Python's own types share, whatever their classes call equal.

    It runs in the sandbox, too, of whose Python nothing is known but that it is version 3.

    Raises:
        TypeError: The value is of another type.
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


# Runs in the sandbox. The answer is a module that is not `__main__`; what it prints goes nowhere.
# Where a test compares with a constant, a hash of the answer's value goes out and is compared
# there, so that nothing in here knows what is right. Any other test has passed when its key is
# written, which is read once it has run.
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
        ended: How the last program ended that did not pass everything, or `passed`; `undecided`
            where the deadline of the caller ended it after it had all the time of its limits.
    """

    num_passed: int
    ended: Literal["passed", "failed", "timeout", "output", "deadline", "undecided"]


def is_suspicious(code: str) -> bool:
    """Whether a program names what forged tests are made with; some honest ones do, too."""
    return _SUSPICIOUS.search(code) is not None


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
    compared = [_comparison(test) for test in asserts]
    keys = [secrets.token_hex(_KEY_BYTES // 2) for found in compared if found is None]
    tests = [
        ("exec", test) if found is None else ("eval", found[0])
        for test, found in zip(asserts, compared, strict=True)
    ]
    job = _encoded(json.dumps([code, tests]))
    ending = run(_HARNESS.encode(), b"%08x" % len(job) + job + "".join(keys).encode())
    lines = Counter(ending.stdout.decode(errors="replace").splitlines())
    numbers = Counter(line.partition(" ")[0] for line in lines.elements())
    own = iter(keys)
    expected = [next(own) if found is None else found[1] for found in compared]
    # One line for each: who writes several tries.
    num_passed = sum(
        lines[f"{index} {line}"] == numbers[str(index)] == 1 for index, line in enumerate(expected)
    )
    ended = _described(ending)
    if num_passed == len(asserts) and ended == "failed":
        return CodeOutcome(num_passed, "passed")
    return CodeOutcome(num_passed, ended)


def _comparison(test: str) -> tuple[str, str] | None:
    """Of `assert EXPRESSION == CONSTANT` the expression, and the hash of the constant; or None."""
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
    """The value of a literal, or of a collection made of one; raises a ValueError without one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _COLLECTIONS.get(node.func.id)
        if make is not None and len(node.args) == 1 and not node.keywords:
            return make(ast.literal_eval(node.args[0]))
    return cast("object", ast.literal_eval(node))


def _described(ending: Ending) -> Literal["failed", "timeout", "output", "deadline"]:
    if ending.reason != "ended":
        return "timeout" if ending.reason == "memory" else ending.reason
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
