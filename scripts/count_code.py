"""Counts the code lines of the packages, without docstrings, comments and blank lines.

python scripts/count_code.py [ROOT]     prints lines per package, their sum, and long functions
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

MAX_FUNCTION_LINES = 60
_LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_files(root: Path) -> dict[str, list[Path]]:
    """The Python files of each package's `src` folder, by the package's name."""
    return {
        folder.parent.name: sorted(folder.rglob("*.py"))
        for folder in sorted(root.glob("packages/*/src"))
    }


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: no docstring, comment or blank line."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT_TOKENS:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def long_functions(source: str, limit: int = MAX_FUNCTION_LINES) -> list[tuple[str, int, int]]:
    """(name, first line, length) of functions over `limit` lines, docstring included."""
    rows = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                rows.append((node.name, node.lineno, length))
    return rows


def main() -> None:
    """Prints the count of the tree at ROOT, by default this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    totals: Counter[str] = Counter()
    long_rows = []
    for package, files in source_files(root).items():
        for path in files:
            source = path.read_text(encoding="utf-8")
            totals[package] += len(code_lines(source))
            long_rows += [(path.relative_to(root), *row) for row in long_functions(source)]
    for package, count in totals.items():
        print(f"{count:7d}  {package}")
    print(f"{totals.total():7d}  total")
    print(f"\nFunctions above {MAX_FUNCTION_LINES} lines: {len(long_rows)}")
    for path, name, line, length in long_rows:
        print(f"{length:7d}  {path}:{line} {name}")


if __name__ == "__main__":
    main()
