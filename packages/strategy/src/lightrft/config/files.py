"""Files read back: of bounded size, of known types, with one error. Standard library only."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import BinaryIO, Never, TypeVar, cast

from lightrft.config.options import LARGEST_INT, accepts, alternatives, short, type_hints, type_name

T = TypeVar("T")
MAX_BYTES = 2**28
PIECE_BYTES = 2**20
MAX_TEXT_BYTES = 2**24
MAX_DEPTH = 200
CHECKSUM = "sha256"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {dict: "an object", list: "a list", str: "a string", type(None): "null"}


class FileError(ValueError):
    """A file that is missing, damaged or of another kind; the message names it and the place."""


class FolderGoneError(RuntimeError):
    """The folder of a run that was moved or removed while the run wrote to it."""


# Folders that this process writes to while a run lasts, each with an open descriptor, which keeps
# its inode from being used again.
_HELD: dict[Path, int] = {}


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Require that the folder stays where it is: `require_held` and the end of the body check.

    Raises:
        FolderGoneError: The folder moved or is gone; an error of the body is its cause.
    """
    before = _HELD.get(folder)
    _HELD[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
        require_held()
    except FolderGoneError:
        raise
    except Exception as error:
        require_held(error)
        raise
    finally:
        os.close(_HELD.pop(folder))
        if before is not None:
            _HELD[folder] = before


def require_held(cause: Exception | None = None) -> None:
    """Raise a FolderGoneError if a held folder no longer has its name."""
    for folder, descriptor in _HELD.items():
        try:
            is_there = os.path.samestat(os.fstat(descriptor), folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            is_there = False
        if not is_there:
            raise FolderGoneError(
                f"--output_dir: {folder} was moved or removed while the run wrote to it, and "
                "nothing was written in its place: bring it back under this name, and the same "
                "command continues from its last checkpoint"
            ) from cause


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the name of a file to system errors that lack one, as those of a flush do."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Make a folder and its parents, but never in the place of a held folder that is gone.

    Raises:
        FolderGoneError: A held folder is gone.
    """
    require_held()
    path.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file with its hash.

    Args:
        path: Relative to the folder of the list that it is on, below it.
        num_bytes, sha256: Size and hash of its content.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if set(self.path.split("/")) & {"", ".", ".."} or "\0" in self.path:
            raise ValueError(f"{short(self.path)} is no file below its folder")

    @classmethod
    def of(cls, folder: Path, name: str) -> FileEntry:
        """Return the entry of an existing file."""
        path = folder / name
        return cls(name, path.stat().st_size, file_sha256(path))

    def damage(self, folder: Path) -> str | None:
        """Return how the file differs from its entry; None if it does not."""
        path = folder / self.path
        try:
            if not path.is_file():
                return f"{self.path} is missing"
            if not path.resolve().is_relative_to(folder.resolve()):
                return f"{self.path} is a link out of its folder"
            if path.stat().st_size != self.num_bytes:
                return f"{self.path} has {path.stat().st_size} bytes, expected {self.num_bytes}"
            if file_sha256(path) != self.sha256:
                return f"{self.path} does not match its SHA-256"
        except OSError as error:  # a disk that cannot read it
            return f"{self.path} cannot be read: {error}"
        return None


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with regular_file(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads from a model's folder, and no others.

    Raises:
        FileError: The index of the files cannot be read.
    """
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("model*.safetensors"))
    names = typed(dict[str, str], read_object(index).get("weight_map"), index)
    return [folder / name for name in sorted(set(names.values()))]


def regular_file(path: Path) -> Path:
    """Return the path if it is a regular file.

    Raises:
        FileError: It is missing, or a folder, a pipe, a socket or a device.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file"
        raise FileError(f"{path} {what if path.exists() else 'does not exist'}: expected a file")
    return path


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        FileError: It is missing, not a regular file, unreadable, or too large.
    """
    try:
        with regular_file(path).open("rb") as stream:
            # A file may grow while it is read, and files of /proc have no size.
            size = os.fstat(stream.fileno()).st_size
            content = stream.read(min(size, max_bytes) + 1)
            if not size and content:
                content += b"".join(_pieces(stream, max_bytes))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise FileError(f"{path} has more than {max_bytes} bytes: expected at most so many")
    return content


def _pieces(stream: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the rest of a stream, up to a piece more than `max_bytes`, to bound memory."""
    num_bytes = 0
    while num_bytes <= max_bytes and (piece := stream.read(PIECE_BYTES)):
        num_bytes += len(piece)
        yield piece


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        FileError: As for `read_bytes`, or it is not text.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as err:
        raise FileError(f"{path} is not UTF-8: {err.reason} at byte {err.start}") from err


def lines_of(path: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; the file may be larger than memory.

    Only a newline ends a line: JSON may leave other separators as they are in a text. A line above
    `max_bytes` comes in parts.

    Raises:
        FileError: It is missing, not a regular file, or unreadable.
    """
    try:
        with regular_file(path).open("rb") as stream:
            while line := stream.readline(max_bytes):
                yield line
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_json(
    content: bytes, place: object, *, max_depth: int = MAX_DEPTH, is_distinct: bool = False
) -> object:
    """Return the value of a JSON text.

    Args:
        content: Bytes of the text.
        place: Place of the text, for messages.
        max_depth: Depth to which lists and objects may be nested.
        is_distinct: Refuse objects with a name twice; otherwise its last value counts.

    Raises:
        FileError: It is not JSON, or is nested too deep; the message begins with the place.
    """
    text = ""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        require_distinct([name for name, _ in pairs], place)
        return dict(pairs)

    try:
        text = content.decode("utf-8")
        value = cast(
            "object", json.loads(text, object_pairs_hook=distinct if is_distinct else None)
        )
    except FileError:
        raise
    except UnicodeDecodeError as err:
        raise FileError(f"{place} is not UTF-8: {err.reason} at byte {err.start}") from err
    except json.JSONDecodeError as err:
        where = f"column {err.colno}" if err.lineno == 1 else f"line {err.lineno}"
        excerpt = text[max(err.pos - 20, 0) : err.pos + 20].strip()
        raise FileError(
            f"{place}: not valid JSON ({err.msg} at {where}, near {excerpt!r})"
        ) from err
    except RecursionError as err:
        raise _too_deep(place, max_depth) from err
    except ValueError as err:
        raise FileError(f"{place}: a number has too many digits ({err})") from err
    if text.count("[") + text.count("{") > max_depth:
        require_flat(value, place, max_depth=max_depth)
    if _SURROGATE.search(text):
        _require_text(value, place)
    return value


def refuse_constant(name: str) -> Never:
    """Raise a ValueError for NaN and the infinities; see `json.loads(parse_constant=)`."""
    raise ValueError(f"{name} is no number of JSON")


def finite_float(text: str) -> float:
    """Return a number of JSON; a ValueError for one that is out of range."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"a number is out of range: {text[:40]}")
    return number


def require_distinct(names: Sequence[str], place: object) -> None:
    """Raise a FileError if a name comes twice: one of its values would be dropped."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"{place} has {twice!r} twice: rename one, or leave it out")


def require_flat(value: object, place: object, *, max_depth: int = MAX_DEPTH) -> None:
    """Raise a FileError if lists and mappings are nested deeper."""
    level = [value]
    for _ in range(max_depth):
        level = [
            item
            for each in level
            if isinstance(each, list | dict)
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise _too_deep(place, max_depth)


def _too_deep(place: object, max_depth: int) -> FileError:
    return FileError(f"{place}: nested deeper than {max_depth} levels: expected a flatter value")


def _require_text(value: object, place: object) -> None:
    """Raise a FileError if a string has half of a surrogate pair, which is no character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as err:
        raise FileError(
            f"{place}: a string has half of a surrogate pair "
            f"(\\u{ord(err.object[err.start]):04x}), which is no character: write it in pairs or "
            "leave it out"
        ) from err


def read_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """Return the object in a JSON file; raise a FileError if there is none."""
    return require_object(parse_json(read_bytes(path, max_bytes=max_bytes), path), path)


def require_object(value: object, place: object) -> dict[str, object]:
    """Return the value if it is a JSON object; raise a FileError otherwise."""
    if isinstance(value, dict):
        return value
    raise FileError(f"{place}: expected an object with names, got {kind_of(value)}")


def parse_object(content: bytes) -> dict[str, object]:
    """Return the JSON object of a line; {} if it is none, such as a line that was cut off."""
    try:
        return require_object(parse_json(content, "a line"), "a line")
    except FileError:
        return {}


def kind_of(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else repr(value))


def sealed(values: Mapping[str, object]) -> str:
    """Return the JSON text of an object, ending with a hash of everything else."""
    return json.dumps({**_unhashed(values), CHECKSUM: _digest(values)}, indent=1)


def unsealed(values: Mapping[str, object], place: object) -> dict[str, object]:
    """Return the values without their hash; raise a FileError if the hash does not match."""
    if values.get(CHECKSUM) != _digest(values):
        raise FileError(f"{place} does not match its own SHA-256")
    return _unhashed(values)


def _unhashed(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name != CHECKSUM}


def _digest(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(_unhashed(values), sort_keys=True).encode()).hexdigest()


def typed(kind: type[T], value: object, place: object, *, skips_unknown: bool = False) -> T:
    """Return dataclasses, tuples and mappings built from JSON values.

    Args:
        kind: Type of the result: a dataclass, a collection, or a type of their fields.
        value: Value as JSON gives it.
        place: Beginning of an error message.
        skips_unknown: Leave out names that a dataclass lacks instead of raising.

    Raises:
        FileError: A value has another type, is missing, unknown or refused by its dataclass.
    """
    return cast("T", _typed(kind, value, place, skips_unknown))


def _typed(kind: object, value: object, place: object, skips: bool) -> object:
    kinds = [each for each in alternatives(kind) if each is not types.NoneType]
    if len(kinds) == 1 and (value is not None or kind is kinds[0]):
        (kind,) = kinds
        if isinstance(kind, type) and is_dataclass(kind):
            return _record(kind, require_object(value, place), place, skips)
        origin, items = typing.get_origin(kind), typing.get_args(kind)
        if origin in (list, tuple, Sequence):
            made = _items(items[0], value, place, skips)
            return made if origin is list else tuple(made)
        if origin in (dict, Mapping):
            values = require_object(value, place)
            return {n: _typed(items[1], v, f"{place}.{n}", skips) for n, v in values.items()}
    is_long = isinstance(value, int) and abs(value) >= 2**64
    if kind not in (typing.Any, object) and (is_long or not accepts(value, kind)):
        raise FileError(f"{place}: got {short(value)}, expected {type_name(kind)}")
    return value


def _items(kind: object, value: object, place: object, skips: bool) -> list[object]:
    if not isinstance(value, list):
        raise FileError(f"{place}: got {short(value)}, expected a list")
    if _are_plain(value, kind):
        return value
    return [_typed(kind, each, f"{place}[{i}]", skips) for i, each in enumerate(value)]


def _are_plain(values: Sequence[object], kind: object) -> bool:
    """Return whether all are of a plain type that needs no check of each: there may be millions."""
    if kind is int:
        return all(type(value) is int and abs(value) <= LARGEST_INT for value in values)
    return kind in (float, str) and all(type(value) is kind for value in values)


def _record(kind: type[T], values: Mapping[str, object], place: object, skips: bool) -> T:
    hints = type_hints(kind)
    arguments = {
        n: _typed(hints[n], v, f"{place}: {n}", skips) for n, v in values.items() if n in hints
    }
    needed = [
        item.name
        for item in fields(kind)  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING
    ]
    for what, names in (
        ("lacks", [name for name in needed if name not in arguments]),
        ("has unknown", [name for name in values if name not in hints and not skips]),
    ):
        if names:
            raise FileError(f"{place} {what} {', '.join(map(short, names[:3]))}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise FileError(f"{place}: {error}") from error
