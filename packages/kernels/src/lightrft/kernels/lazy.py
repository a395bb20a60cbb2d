"""Packages whose names are imported on first use (PEP 562)."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_names(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__` from its `if TYPE_CHECKING:` block.

    Names imported there for type checkers (as `from module import name as name`) are imported at
    run time on first use.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    homes = {
        alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def __getattr__(name: str) -> object:  # noqa: N807
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(importlib.import_module(homes[name]))[name]

    return __getattr__, lambda: sorted(homes), sorted(homes)
