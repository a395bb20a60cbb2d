"""Imported by the process that ranks are forked from: a rank names the test that started it."""

from reach_plugin import name_context
from tests import ranks

_load = ranks._load_function


def _load_function(file: str, qualified_name: str) -> object:
    name_context()  # a rank's environment is in place now
    return _load(file, qualified_name)


ranks._load_function = _load_function
