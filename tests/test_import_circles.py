"""No module needs itself: imports form no circle, those for type checkers included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_of(root):
    found = {}
    for source in sorted(root.glob("packages/*/src")):
        for path in sorted(source.glob("lightrft/**/*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(tree, known):
    """Modules that a file names in any import statement, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & known


def circle(graph):
    """Return modules that need each other in a circle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def graph_of(root):
    modules = modules_of(root)
    known = set(modules)
    return {
        name: imports_of(ast.parse(path.read_text()), known) - {name}
        for name, path in modules.items()
    }


@pytest.mark.full
def test_imports_form_no_circle():
    assert circle(graph_of(ROOT)) == []


@pytest.mark.parametrize(
    "line", ["from lightrft.b import x", "if TYPE_CHECKING:\n    from lightrft import b"]
)
def test_a_planted_circle_is_found(tmp_path, line):
    package = tmp_path / "packages/p/src/lightrft"
    package.mkdir(parents=True)
    (package / "a.py").write_text(line)
    (package / "b.py").write_text("def f():\n    from lightrft.a import y\n")
    assert set(circle(graph_of(tmp_path))) == {"lightrft.a", "lightrft.b"}
