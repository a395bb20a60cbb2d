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
    """Return the number of weights in the files of a model directory; 0 without files."""
    try:
        files = weight_files(Path(path))
    except ValueError:
        return 0  # loading reports a damaged index
    return sum(math.prod(shape) for file in files for shape in _shapes(file).values())


def cut_files(path: str) -> Iterator[tuple[Path, int, int]]:
    """Yield the weight files of a model directory that are shorter than their headers say.

    Yields:
        File, its size in bytes, and the size that it should have.
    """
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            length, tensors = _read_header(file)
            offsets = (entry["data_offsets"] for entry in tensors.values())
            ends = [typed(list[int], pair, file)[1] for pair in offsets]
        except (OSError, ValueError, KeyError, IndexError):
            continue  # loading reports a damaged file
        size, whole = file.stat().st_size, 8 + length + max(ends, default=0)
        if size < whole:
            yield file, size, whole


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name in all readable safetensors files of a model directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        shapes |= _shapes(file)
    return shapes


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name in a safetensors file; {} if its header cannot be read."""
    try:
        entries = _read_header(path)[1].items()
        return {name: tuple(typed(list[int], entry["shape"], path)) for name, entry in entries}
    except (OSError, ValueError, KeyError):
        return {}  # loading reports a damaged file


def _read_header(path: Path) -> tuple[int, dict[str, dict[str, object]]]:
    """Return the length of a file's header, and its entry for each tensor by name."""
    with regular_file(path).open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # Bounded: a damaged length would ask for as much memory.
        content = stream.read(min(length, path.stat().st_size, MAX_HEADER_BYTES))
    header = require_object(parse_json(content, path), path)
    header.pop("__metadata__", None)
    return length, {name: require_object(entry, path) for name, entry in header.items()}
