"""Data sets of the package `datasets`: by name from its cache or the hub, or saved in a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.datasets.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SAVED_FILES = ("dataset_dict.json", "dataset_info.json")
"""One of these marks a folder that `save_to_disk` has written."""
_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<configuration>[\w.-]+))?\Z")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")


def is_hub_name(text: str) -> bool:
    """Whether a text can only be `owner/name[:configuration]`: nothing local has that path."""
    match = _NAME.match(text)
    if match is None or text.endswith(_FILE_SUFFIXES) or text.startswith("."):
        return False
    return not Path(match["name"]).exists() and not Path(match["name"]).parent.is_dir()


def load_rows(source: str, split: str) -> Iterator[Mapping[str, object]]:
    """The rows of one split.

    Args:
        source: `owner/name[:configuration]`, or a folder that `save_to_disk` has written.
        split: Its name; by-name data sets also know slices such as `train[:100]`.

    Raises:
        DataError: The package is missing, the data set is not to be had, or has no such split.
    """
    try:
        import datasets
    except ImportError as err:
        raise DataError(
            f"{source}: reading a data set needs the package datasets (`pip install datasets`), "
            "or give a JSONL, JSON or Parquet file"
        ) from err
    try:
        if is_hub_name(source):
            name, _, configuration = source.partition(":")
            parts = {split: datasets.load_dataset(name, configuration or None, split=split)}
        else:
            saved = datasets.load_from_disk(source)
            parts = {split: saved} if isinstance(saved, datasets.Dataset) else saved
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as err:
        reason = next(iter(str(err).splitlines()), type(err).__name__)
        raise DataError(
            f"{source}: the data set cannot be loaded: {reason}; a machine without network finds "
            "only what its cache holds (HF_HOME), or give a local file"
        ) from err
    if split not in parts:
        raise DataError(f"{source} has no split {split!r}: found {', '.join(parts)}")
    yield from parts[split]
