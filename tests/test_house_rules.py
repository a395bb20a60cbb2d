"""Rules about the source that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("packages/*/src/lightrft/**/*.py"))
MAX_FUNCTION_LINES = 60
# Packages none of whose functions is longer.
SHORT_FUNCTIONS = {"kernels"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_sources():
    assert len(SOURCES) > 20


def function_lengths(source: str) -> dict[str, int]:
    """Lines of each function, from its first to its last, docstring included."""
    nodes = ast.walk(ast.parse(source))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{n.lineno} {n.name}": n.end_lineno - n.lineno + 1 for n in functions}


def test_functions_are_short():
    too_long = {
        f"{_name(path)}:{function}": length
        for path in SOURCES
        if path.relative_to(ROOT).parts[1] in SHORT_FUNCTIONS
        for function, length in function_lengths(path.read_text()).items()
        if length > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_a_long_function_is_noticed():
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert function_lengths(f"def short():\n    pass\n\n\ndef long():\n{body}") == {
        "1 short": 2,
        "5 long": MAX_FUNCTION_LINES + 1,
    }


def test_no_modality_twins():
    assert not [_name(p) for p in SOURCES if p.stem.endswith("_vl")]


@pytest.mark.parametrize("forbidden", ["torch.distributed", "logging", "os", "pathlib"])
def test_algorithms_do_no_communication_and_no_io(forbidden):
    offenders = []
    for path in SOURCES:
        if "algorithms" not in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name == forbidden or name.startswith(forbidden + ".") for name in names):
                offenders.append(_name(path))
    assert not offenders


def test_engine_type_is_compared_only_in_a_factory():
    offenders = [
        _name(p)
        for p in SOURCES
        if p.name not in {"factory.py"} and 'engine_type == "' in p.read_text()
    ]
    assert not offenders


def test_every_public_function_has_a_docstring():
    missing = []
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            is_def = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_def and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{_name(path)}:{node.lineno} {node.name}")
    assert not missing
