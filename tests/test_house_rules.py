"""Rules about the source that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("packages/*/src/lightrft/**/*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_sources():
    assert len(SOURCES) > 20


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
