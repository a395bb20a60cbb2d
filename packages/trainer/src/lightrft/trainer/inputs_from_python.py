"""Rows and functions in the caller's memory, in a form that options of a run can name."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightrft.config import ConfigError
from lightrft.config.files import kind_of, parse_object
from lightrft.config.registry import REGISTRIES
from lightrft.datasets.files import encoded_rows, without_nan
from lightrft.datasets.types import DataError
from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.engines.media.sources import as_image

MEDIA_FOLDER = "media"
_PATH_KEYS = ("path", "url", "frames", "input_audio")
_IMAGE_KEYS = ("image", "images", "frames", "image_url", "url", "bytes", "video", "videos")
Rows = Iterable[Mapping[str, object]]
Function = Callable[..., object]


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows as the lines of a file that is named after its contents, with their media beside it.

    Args:
        path: Target of `write`.
        lines: Contents of the file.
        media: Bytes of media by the paths that `lines` name; a path identifies its contents.
    """

    path: Path
    lines: bytes
    media: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows, name: str, folder: Path, columns: Iterable[str] = ()) -> "GivenRows":
        """Return the file of some rows; write nothing.

        Args:
            rows: Mappings by column name with values that JSON can hold, images of Pillow, arrays
                and encoded bytes: a list, a `datasets.Dataset`, a generator. Paths of files are
                relative to the working directory.
            name: Kind of rows, for the name of the file.
            folder: Folder of the file.
            columns: Further columns that hold images or videos.

        Raises:
            DataError: There are no rows, or one is not a mapping or holds other values.
        """
        if not isinstance(rows, Iterable):
            raise DataError(
                f"{name}: expected rows (a list of mappings, a datasets.Dataset) or the path of a "
                f"file, got {type(rows).__name__}"
            )
        kept = _KeptMedia(columns)
        numbered = enumerate(encoded_rows(rows), start=1)
        lines = [_line(row, f"{name}: row {number}", kept) for number, row in numbered]
        if not lines:
            raise DataError(f"{name} holds no rows: expected at least one")
        content = b"".join(lines)
        digest = hashlib.sha256(content).hexdigest()[:12]
        return cls(folder / f"{name}-{digest}.jsonl", content, kept.files)

    @property
    def first(self) -> Mapping[str, object]:
        """Return the first row."""
        return parse_object(self.lines.partition(b"\n")[0])

    def write(self) -> None:
        """Write each file whole or not at all; several processes may write it at once."""
        for name, content in self.media.items():
            if not (self.path.parent / name).exists():
                _write(self.path.parent / name, content)
        _write(self.path, self.lines)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


class _KeptMedia:
    """Values of rows as JSON holds them, and files of the others."""

    def __init__(self, columns: Iterable[str]) -> None:
        self.files: dict[str, bytes] = {}
        self._images = {*_IMAGE_KEYS, *columns}
        self._paths = {*_PATH_KEYS, *columns}

    def as_json(self, value: object, key: str = "") -> object:
        """Return a value with the path of a file in the place of each medium.

        Args:
            value: Value of a column, or within one.
            key: Name of the value.

        Raises:
            MediaError: An image or array cannot be read.
        """
        if isinstance(value, str):
            is_path = any(key.startswith(kind) for kind in MEDIA_KINDS) or key in self._paths
            return _from_anywhere(value) if is_path else value
        if isinstance(value, Mapping):
            return {str(name): self.as_json(each, str(name)) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_json(each, key) for each in value]
        if isinstance(value, bytes | bytearray | memoryview):
            return self._file(bytes(value))
        if hasattr(value, "save"):
            return self._image(value, key)
        if hasattr(value, "__array__"):
            return self._array(np.asarray(value), key)
        return value

    def _array(self, numbers: np.ndarray, key: str) -> object:
        if key in self._images and numbers.ndim in (2, 3):
            return self._image(numbers, key)
        # Samples of a sound, frames, or no medium at all.
        return self.as_json([*numbers], key) if numbers.ndim > 3 else numbers.tolist()

    def _image(self, value: object, key: str) -> str:
        return self._file(as_image(value, name=key, folder=Path()).read())

    def _file(self, content: bytes) -> str:
        name = f"{MEDIA_FOLDER}/{hashlib.sha256(content).hexdigest()[:32]}"
        self.files[name] = content
        return name


def _from_anywhere(text: str) -> str:
    """Return a path of a file that does not depend on the folder; anything else as it is."""
    try:
        path = Path(text.removeprefix("file://"))
        return str(path.resolve()) if path.is_file() else text
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return text


def _line(row: object, location: str, kept: _KeptMedia) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{location}: expected a mapping with named columns, got {kind_of(row)}; give each row "
            'as {"input": ..., "label": ...}, a data frame as frame.to_dict("records"), one split '
            "of a DatasetDict"
        )
    values = {}
    for name, value in row.items():
        try:
            values[name] = kept.as_json(without_nan(value), str(name))
            json.dumps({name: values[name]}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{location}: column {name!r} cannot be kept as JSON: {error}; convert it, or save "
                "the rows (`datasets.Dataset.save_to_disk`, Parquet) and give the path"
            ) from error
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"


@contextmanager
def named_functions(options: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the options with a registered name in the place of each function.

    The registries of `REGISTRIES` know the names inside the block only, so that a notebook may
    define a function again and train again.

    Args:
        options: Options by name; a function, or some in a list, may stand for a choice's name.

    Raises:
        ConfigError: Two functions of one option have one name, or a choice has that name.
    """
    with ExitStack() as stack:
        named = dict(options)
        for option in REGISTRIES:
            if option not in named:
                continue
            value = named[option]
            several = isinstance(value, list | tuple)
            items = list(value) if isinstance(value, list | tuple) else [value]
            functions: dict[str, object] = {}
            for place, item in enumerate(items):
                if not callable(item):
                    continue
                name = _name_of(item)
                if name in functions or name in REGISTRIES[option]:
                    raise ConfigError(
                        f"{option}: there are two choices of the name {name!r}: give the function "
                        "another name"
                    )
                functions[name], items[place] = item, name
            stack.enter_context(REGISTRIES[option].lent(functions))
            named[option] = tuple(items) if several else items[0]
        yield named


def _name_of(function: Function) -> str:
    """Return its name; for a lambda, a partial or an object that of its kind."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "function"
