"""Rows of JSONL, JSON and Parquet files and of data sets, each with the place it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.datasets.errors import DataError
from lightrft.datasets.hub import SAVED_FILES, is_hub_name, load_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file.

    Args:
        columns: Values by column name.
        location: `file:line` of a JSONL row, `file, row n` of others; for error messages.
    """

    columns: Mapping[str, object]
    location: str


def read_rows(path: str | Path, *, split: str = "train") -> list[Row]:
    """All rows of a file, or of one split of a folder or of a data set.

    Args:
        path: A .jsonl, .json (a list of objects) or .parquet file; a folder that holds
            `<split>.jsonl`, or `<split>-*.parquet` and the like, itself or in `data/`; a folder
            that `datasets` has saved; or the name of a data set, `owner/name[:configuration]`.
        split: Which files of a folder or part of a data set; a file has no splits.

    Raises:
        DataError: nothing there, unknown format, malformed content, or no rows.
    """
    rows = []
    for item in scan_rows(path, split=split):
        if isinstance(item, DataError):
            raise item
        rows.append(item)
    if not rows:
        raise DataError(f"{path} holds no rows: expected at least one")
    return rows


def scan_rows(path: str | Path, *, split: str = "train") -> Iterator[Row | DataError]:
    """Rows as `read_rows` gives them, and in the place of each malformed one its error.

    Raises:
        DataError: nothing there, or no row of it can be read.
    """
    if is_hub_name(str(path)) or _is_saved(Path(path)):
        for number, columns in enumerate(load_rows(str(path), split), start=1):
            yield Row(columns, f"{path}[{split}], row {number}")
        return
    for file in _files(Path(path), split):
        yield from _reader(file)(file)


def has_splits(path: str | Path) -> bool:
    """Whether a source has parts with names: a folder or a data set has, a file has not."""
    return not Path(path).is_file()


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED_FILES)


def _read_jsonl(path: Path) -> Iterator[Row | DataError]:
    # Bytes, split at newlines only: str.splitlines also splits at separators inside JSON strings.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            start = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if start.strip():
                yield _line(start, location)


def _read_json(path: Path) -> Iterator[Row | DataError]:
    content = _parse(_decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path)), str(path))
    if not isinstance(content, list):
        raise DataError(
            f"{path}: expected a list of objects, got {_kind(content)}; for one object per line "
            "name the file .jsonl"
        )
    for number, item in enumerate(content, start=1):
        yield _row(item, f"{path}, row {number}")


def _read_parquet(path: Path) -> Iterator[Row | DataError]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as err:
        raise DataError(
            f"{path}: reading Parquet needs the package pyarrow (`pip install pyarrow`), or "
            "convert the file to JSONL"
        ) from err
    try:
        items = cast("list[object]", parquet.read_table(path).to_pylist())
    except (ArrowException, OSError) as err:
        raise DataError(f"{path} is not a readable Parquet file: {err}") from err
    for number, item in enumerate(items, start=1):
        yield _row(item, f"{path}, row {number}")


READERS: dict[str, Callable[[Path], Iterator[Row | DataError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Callable[[Path], Iterator[Row | DataError]]:
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"{path}: unknown file format {suffix or '(no suffix)'!r}: expected one of "
            f"{', '.join(READERS)}"
        )
    return READERS[suffix]


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"{path} does not exist: expected a {', '.join(READERS)} file, a folder with "
            f"{split}.jsonl, or the name of a data set, owner/name"
        )
    for folder in (path, path / "data"):
        for suffix in READERS:
            found = sorted(folder.glob(f"{split}-*{suffix}"))
            single = folder / f"{split}{suffix}"
            if single.is_file() or found:
                return [single] if single.is_file() else found
    present = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    raise DataError(
        f"{path} has no split {split!r}: expected {split}.jsonl, {split}.json or {split}.parquet, "
        f"found {present}"
    )


def _line(line: bytes, location: str) -> Row | DataError:
    try:
        return _row(_parse(_decode(line, location), location), location)
    except DataError as err:
        return err


def _row(content: object, location: str) -> Row | DataError:
    try:
        return Row(_object(content, location), location)
    except DataError as err:
        return err


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as err:
        raise DataError(f"{location} is not UTF-8: {err.reason} at byte {err.start}") from err


def _parse(text: str, location: str) -> object:
    try:
        return cast("object", json.loads(text))
    except json.JSONDecodeError as err:
        where = f"column {err.colno}" if err.lineno == 1 else f"line {err.lineno}"
        excerpt = text[max(err.pos - 20, 0) : err.pos + 20].strip()
        raise DataError(
            f"{location}: not valid JSON ({err.msg} at {where}, near {excerpt!r})"
        ) from err


def _object(value: object, location: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{location}: expected an object with named columns, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else repr(value))
