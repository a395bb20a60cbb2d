"""Prompts from files, folders and named data sets."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.datasets.errors import DataError as DataError
    from lightrft.datasets.files import Row as Row
    from lightrft.datasets.files import read_rows as read_rows
    from lightrft.datasets.mixture import read_sources as read_sources
    from lightrft.datasets.prompts import PromptDataset as PromptDataset
    from lightrft.datasets.prompts import collate_prompts as collate_prompts
    from lightrft.datasets.prompts import load_prompts as load_prompts
    from lightrft.datasets.types import Prompt as Prompt

_MODULES = {
    "DataError": "errors",
    "Prompt": "types",
    "PromptDataset": "prompts",
    "Row": "files",
    "collate_prompts": "prompts",
    "load_prompts": "prompts",
    "read_rows": "files",
    "read_sources": "mixture",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
