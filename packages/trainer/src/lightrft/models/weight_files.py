"""Sizes of models from the headers of their files, without torch."""

import math
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.files import (
    parse_json,
    regular_file,
    require_object,
    typed,
    weight_files,
)

# No writer of such files makes a longer header, and no reader takes one.
MAX_HEADER_BYTES = 100_000_000


def count_model(path: str) -> int:
    """Return the numbers in the weight files of a model directory; 0 where there are none."""
    try:
        return sum(map(count_parameters, weight_files(Path(path))))
    except ValueError:
        return 0  # a damaged index is reported by what loads it


def cut_files(path: str) -> Iterator[tuple[Path, int, int]]:
    """Yield the weight files of a model directory that are shorter than their headers say.

    Yields:
        The file, its bytes, and those that it should have.
    """
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            length, tensors = _read_header(file)
            offsets = (entry["data_offsets"] for entry in tensors.values())
            ends = [typed(list[int], pair, file)[1] for pair in offsets]
        except (OSError, ValueError, KeyError, IndexError):
            continue  # a damaged file is reported by what loads it
        size, whole = file.stat().st_size, 8 + length + max(ends, default=0)
        if size < whole:
            yield file, size, whole


def count_parameters(path: Path) -> int:
    """Return numbers in a safetensors file, from its header; 0 if it has none that can be read."""
    try:
        return sum(map(math.prod, _shapes(path).values()))
    except (OSError, ValueError, KeyError):
        return 0  # a damaged file is reported by what loads it


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name in all safetensors files of a model directory that can be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            found |= _shapes(file)
        except (OSError, ValueError, KeyError):
            continue  # a damaged file is reported by what loads it
    return found


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    entries = _read_header(path)[1].items()
    return {name: tuple(typed(list[int], entry["shape"], path)) for name, entry in entries}


def _read_header(path: Path) -> tuple[int, dict[str, dict[str, object]]]:
    """Return the length of a file's header, and what it says of each tensor by name."""
    with regular_file(path).open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # No more than there is: a damaged length would ask for as much memory.
        content = stream.read(min(length, path.stat().st_size, MAX_HEADER_BYTES))
    header = require_object(parse_json(content, path), path)
    header.pop("__metadata__", None)
    return length, {name: require_object(entry, path) for name, entry in header.items()}
