"""Prompts from files, folders and named data sets."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.datasets.files import (
        Row as Row,
        read_rows as read_rows,
        read_sources as read_sources,
    )
    from lightrft.datasets.prompts import (
        PromptDataset as PromptDataset,
        collate_prompts as collate_prompts,
        load_prompts as load_prompts,
    )
    from lightrft.datasets.types import DataError as DataError, Prompt as Prompt

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
