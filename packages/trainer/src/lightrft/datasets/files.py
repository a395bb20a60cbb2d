"""Rows of JSONL, JSON and Parquet files, each with the place it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.datasets.errors import DataError

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
    """All rows of a file, or of the files of one split of a folder.

    Args:
        path: A .jsonl, .json (a list of objects) or .parquet file, or a folder that holds
            `<split>.jsonl`, or `<split>-*.parquet` and the like.
        split: Which files of a folder; a file has no splits.

    Raises:
        DataError: nothing there, unknown format, malformed content, or no rows.
    """
    rows = [row for file in _files(Path(path), split) for row in _reader(file)(file)]
    if not rows:
        raise DataError(f"{path} holds no rows: expected at least one")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    # Bytes, split at newlines only: str.splitlines also splits at separators inside JSON strings.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            text = _decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, location)
            if text.strip():
                yield Row(_object(_parse(text, location), location), location)


def _read_json(path: Path) -> Iterator[Row]:
    content = _parse(_decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path)), str(path))
    if not isinstance(content, list):
        raise DataError(
            f"{path}: expected a list of objects, got {_kind(content)}; for one object per line "
            "name the file .jsonl"
        )
    for number, item in enumerate(content, start=1):
        location = f"{path}, row {number}"
        yield Row(_object(item, location), location)


def _read_parquet(path: Path) -> Iterator[Row]:
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
        location = f"{path}, row {number}"
        yield Row(_object(item, location), location)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
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
            f"{path} does not exist: expected a {', '.join(READERS)} file or a folder with "
            f"{split}.jsonl; data sets are read from local files only"
        )
    for suffix in READERS:
        found = sorted(path.glob(f"{split}-*{suffix}"))
        single = path / f"{split}{suffix}"
        if single.is_file() or found:
            return [single] if single.is_file() else found
    present = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    raise DataError(
        f"{path} has no split {split!r}: expected {split}.jsonl, {split}.json or {split}.parquet, "
        f"found {present}"
    )


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
