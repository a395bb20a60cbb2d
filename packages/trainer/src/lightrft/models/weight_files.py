"""Sizes of models from the headers of their files, without torch."""

import math
from pathlib import Path

from lightrft.config.files import parse_json, require_object, typed

# No writer of such files makes a longer header, and no reader takes one.
MAX_HEADER_BYTES = 100_000_000


def count_model(path: str) -> int:
    """Numbers in all safetensors files of a model directory; 0 where there are none."""
    return sum(map(count_parameters, Path(path).glob("*.safetensors")))


def count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, from its header; 0 if it has none that can be read."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # No more than there is: a damaged length would ask for as much memory.
            content = stream.read(min(length, path.stat().st_size, MAX_HEADER_BYTES))
        header = require_object(parse_json(content, path), path)
        header.pop("__metadata__", None)
        shapes = [require_object(entry, path)["shape"] for entry in header.values()]
        return sum(math.prod(typed(list[int], shape, path)) for shape in shapes)
    except (OSError, ValueError, KeyError):
        return 0  # a damaged file is reported by what loads it
