"""Rows of JSONL, JSON and Parquet files and of data sets, each with its location."""

import csv
import math
import os
import random
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import cast

from lightrft.config.files import (
    MAX_TEXT_BYTES,
    FileError,
    kind_of,
    lines_of,
    parse_json,
    read_bytes,
    regular_file,
    require_distinct,
)
from lightrft.config.other_names import said_once
from lightrft.config.parts.data import probability_problem, split_sources
from lightrft.config.printable import one_line
from lightrft.config.registry import DATA_SOURCES, split_kind
from lightrft.datasets.types import DataError
from lightrft.kernels.names import first_line

# One of these files marks a folder that `save_to_disk` wrote.
SAVED_FILES = ("dataset_dict.json", "dataset_info.json")
MAX_DEPTH = 100
MAX_LIST_BYTES = 2**31
# Memory limit of a Parquet file's rows: a multiple of its size, but at least this much.
MAX_EXPANSION, MIN_PARQUET_BYTES = 1000, 2**28
PARQUET_ROWS = 1024
_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<configuration>[\w.-]+))?\Z")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
# Yields the rows of (source, split).
RowSource = Callable[[str, str], Iterator[Mapping[str, object]]]
# Columns of a CSV table whose cells are numbers.
_NUMBERS = ("margin", "score", "score_chosen", "score_rejected", "weight")
_PADDED = (
    "nulls within calls and tools are left out: Parquet has them under every key of other rows"
)
# Each message, and each schema of a tool, has one of these keys.
_KEYS_OF_MESSAGES = ("role", "from", "function", "parameters")


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a data file.

    Args:
        columns: Values by column name.
        location: `file:line` of a JSONL row, `file, row n` of others; for error messages.
        folder: Folder to which its paths are relative.
        remark: Parts of the row that were left out; "" for none.
        roots: Further folders that may hold files named by the row.
    """

    columns: Mapping[str, object]
    location: str
    folder: Path = Path()
    remark: str = ""
    roots: tuple[Path, ...] = ()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Begin errors about the row with its place, unless they do already."""
        try:
            yield
        except DataError as error:
            if str(error).startswith(self.location):
                raise
            raise DataError(f"{self.location}: {error}") from error


def read_rows(path: str | Path, *, split: str = "train") -> list[Row]:
    """Return all rows of a file, or of one split of a folder or of a data set.

    Args:
        path: A .jsonl, .json (a list of objects) or .parquet file; a folder with `<split>.jsonl`,
            `<split>-*.parquet` and the like, directly or in `data/`; a folder that `datasets`
            saved; the name of a data set, `owner/name[:configuration]`; or `KIND:WHAT` of a
            registered kind of data source.
        split: Split of a folder or a data set; a file has no splits.

    Raises:
        DataError: The path does not exist, or its format is unknown, malformed or without rows.
    """
    rows = []
    for item in scan_rows(path, split=split):
        if isinstance(item, DataError):
            raise item
        rows.append(item)
    if not rows:
        raise DataError(f"{path} holds no rows: expected at least one")
    return with_whole_numbers(rows)


def scan_rows(path: str | Path, *, split: str = "train") -> Iterator[Row | DataError]:
    """Yield the rows of `read_rows`, and for each malformed one its error.

    Raises:
        DataError: The path does not exist, or none of its rows can be read.
    """
    kind, source = split_kind(str(path), DATA_SOURCES)
    load: RowSource | None = None
    roots = _roots(source)
    if kind is not None:
        load = cast("RowSource", DATA_SOURCES.load(kind))
    elif is_hub_name(str(path)) or any((Path(path) / name).is_file() for name in SAVED_FILES):
        load = _load_rows
    if load is not None:
        for number, columns in enumerate(load(str(path), split), start=1):
            yield replace(_cleaned(columns, f"{path}[{split}], row {number}"), roots=roots)
        return
    for file in _files(Path(path), split):
        for item in _reader(file)(file):
            if isinstance(item, Row):
                item = replace(item, folder=file.parent, roots=roots)
            yield item


def _roots(source: str) -> tuple[Path, ...]:
    """Return the folders in which files named by a source's rows may lie."""
    if os.path.exists(source):
        return (Path(source) if os.path.isdir(source) else Path(source).parent,)
    if not is_hub_name(source):
        return ()
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    return Path(HF_HUB_CACHE), Path(HF_HOME, "datasets")


def is_hub_name(text: str) -> bool:
    """Return whether a text can only be `owner/name[:configuration]`, not a local path."""
    match = _NAME.match(text)
    if match is None or text.endswith(_FILE_SUFFIXES) or text.startswith("."):
        return False
    return not Path(match["name"]).exists() and not Path(match["name"]).parent.is_dir()


def _load_rows(source: str, split: str) -> Iterator[Mapping[str, object]]:
    """Yield the rows of one split.

    Args:
        source: `owner/name[:configuration]`, or a folder that `save_to_disk` wrote.
        split: Name of the split; data sets by name also know slices such as `train[:100]`.

    Raises:
        DataError: The package is missing, the data set is unavailable, or it has no such split.
    """
    try:
        import datasets
    except ImportError as err:
        raise DataError(
            f"{source}: reading a data set needs the package datasets (`pip install datasets`), "
            "or give a JSONL, JSON or Parquet file"
        ) from err
    if is_hub_name(source):
        from lightrft.utils.hub import is_hub_reachable

        said_once(f"looking for {source} in the hub and its cache", by_workers=True)
        if not is_hub_reachable():
            datasets.config.HF_HUB_OFFLINE = True  # else each file is requested several times
    try:
        if is_hub_name(source):
            name, _, configuration = source.partition(":")
            parts = {split: datasets.load_dataset(name, configuration or None, split=split)}
        else:
            saved = datasets.load_from_disk(source)
            parts = {split: saved} if isinstance(saved, datasets.Dataset) else saved
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as err:
        reason = first_line(err)
        raise DataError(
            f"{source}: the data set cannot be loaded: {reason}; a machine without network finds "
            "only what its cache holds (HF_HOME), or give a local file"
        ) from err
    if split not in parts:
        raise DataError(f"{source} has no split {split!r}: found {', '.join(parts)}")
    yield from encoded_rows(parts[split])


def encoded_rows(rows: Iterable[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """Yield the rows, with media of a data set as encoded bytes.

    A data set with a transform yields the transformed rows.
    """
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(rows, datasets.IterableDataset):
        yield from map(_without_padding, rows.decode(False))
        return
    if (
        datasets is not None
        and isinstance(rows, datasets.Dataset)
        and rows.format["type"] != "custom"
    ):
        for table in rows.with_format("arrow").iter(PARQUET_ROWS):
            yield from map(_without_padding, table.to_pylist())
        return
    yield from rows


def _read_jsonl(path: Path) -> Iterator[Row | DataError]:
    try:
        for number, line in enumerate(lines_of(path), start=1):
            start = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if start.strip():
                yield _row(start, f"{path}:{number}")
    except FileError as err:
        raise DataError(str(err)) from err


def _read_json(path: Path) -> Iterator[Row | DataError]:
    try:
        text = read_bytes(path, max_bytes=MAX_LIST_BYTES)
    except FileError as err:
        raise DataError(f"{err}; a larger table is one of lines, .jsonl, or Parquet") from err
    content = _parse(text.removeprefix(b"\xef\xbb\xbf"), str(path))
    if not isinstance(content, list):
        raise DataError(
            f"{path}: expected a list of objects, got {kind_of(content)}; for one object per line "
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
    number = num_bytes = 0
    try:
        limit = max(MIN_PARQUET_BYTES, MAX_EXPANSION * path.stat().st_size)
        with parquet.ParquetFile(regular_file(path)) as file:
            _require_distinct(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                rows = cast("list[dict[str, object]]", batch.to_pylist())
                # Arrow stores a repeated text once, Python as often as it occurs.
                texts = (v for row in rows for v in row.values() if isinstance(v, str | bytes))
                num_bytes += max(batch.nbytes, sum(map(len, texts)))
                if num_bytes > limit:
                    raise DataError(
                        f"{path}: its rows take more than {limit} bytes of memory: expected at "
                        f"most {MAX_EXPANSION} times the size of the file; its rows repeat "
                        "themselves, write each once"
                    )
                for number, row in enumerate(rows, start=number + 1):  # noqa: B020
                    yield _row(_without_padding(row), f"{path}, row {number}")
    except (ArrowException, OSError) as err:
        raise DataError(f"{path} is not a readable Parquet file: {one_line(str(err))}") from err


def _read_csv(path: Path) -> Iterator[Row | DataError]:
    """Yield the rows of a table with a header: texts, and numbers in the columns of numbers."""
    csv.field_size_limit(MAX_TEXT_BYTES)
    try:
        lines = (line.decode("utf-8").removeprefix("\ufeff") for line in lines_of(path))
        reader = csv.reader(lines, strict=True)
        names = next(reader, [])
        _require_distinct(names, path)
        for cells in filter(None, reader):
            place = f"{path}:{reader.line_num}"
            if len(cells) == len(names):
                yield _row({n: _cell(n, c) for n, c in zip(names, cells, strict=True)}, place)
            else:
                yield DataError(f"{place}: {len(cells)} cells, the header has {len(names)}")
    except (csv.Error, FileError, UnicodeDecodeError) as err:
        raise DataError(f"{path} is no table of comma-separated values in UTF-8: {err}") from err


def _require_distinct(names: Sequence[str], path: Path) -> None:
    try:
        require_distinct(names, path)
    except FileError as err:
        raise DataError(str(err)) from err


def _cell(name: str, text: str) -> object:
    """Return the value of a cell: a text, except in columns of numbers and labels."""
    if name == "label" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text) if name in _NUMBERS else text
    except ValueError:
        return text


READERS: dict[str, Callable[[Path], Iterator[Row | DataError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _reader(path: Path) -> Callable[[Path], Iterator[Row | DataError]]:
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"{path}: unknown file format {suffix or '(no suffix)'!r}: expected one of "
            f"{', '.join(READERS)}"
        )
    return READERS[suffix]


def local_files(source: str, split: str) -> list[Path]:
    """Return the files with a source's rows; only files on this machine.

    Args:
        source: Source like that of `read_rows`, also `KIND:FILE` and `KIND:FOLDER`.
        split: Split of a folder.
    """
    kind, rest = split_kind(source, DATA_SOURCES)
    path = Path(rest)
    if kind is not None and path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if any((path / name).is_file() for name in SAVED_FILES):
        return sorted(path.rglob("*.arrow"))
    try:
        return _files(path, split)
    except DataError:
        return []


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
            parts = sorted(folder.glob(f"{split}-*{suffix}"))
            single = folder / f"{split}{suffix}"
            if single.is_file() or parts:
                return [single] if single.is_file() else parts
    present = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    raise DataError(
        f"{path} has no split {split!r}: expected {split}.jsonl, {split}.json or {split}.parquet, "
        f"found {present}"
    )


def _row(content: object, location: str) -> Row | DataError:
    """Return the row of parsed content or of the bytes of a line."""
    try:
        value = _parse(content, location) if isinstance(content, bytes) else content
    except DataError as err:
        return err
    if isinstance(value, dict):
        return _cleaned(value, location)
    return DataError(f"{location}: expected an object with named columns, got {kind_of(value)}")


def _cleaned(columns: Mapping[str, object], location: str) -> Row:
    remark = _PADDED if isinstance(columns, _Unpadded) else ""
    cells = {name: without_nan(value) for name, value in columns.items()}
    return Row(cells, location, remark=remark)


def without_nan(value: object) -> object:
    """Return the value of a cell, None for NaN, which pandas writes for missing values."""
    return None if isinstance(value, float) and math.isnan(value) else value


def with_whole_numbers(rows: list[Row]) -> list[Row]:
    """Turn float columns with gaps back to integers if all values are whole, as pandas' are."""
    names = {name for row in rows for name, value in row.columns.items() if value is None}
    for name in list(names):
        values = [row.columns[name] for row in rows if row.columns.get(name) is not None]
        if not values or not all(isinstance(each, float) and each.is_integer() for each in values):
            names.remove(name)
    if not names:
        return rows
    return [replace(row, columns=_whole(row.columns, names)) for row in rows]


def _whole(columns: Mapping[str, object], names: Container[str]) -> dict[str, object]:
    return {
        name: int(value) if name in names and isinstance(value, float) else value
        for name, value in columns.items()
    }


class _Unpadded(dict[str, object]):
    """Columns of Arrow whose calls or tools had nulls removed."""


def _without_padding(columns: Mapping[str, object]) -> dict[str, object]:
    """Return columns of Arrow without the nulls that messages and tools have for other rows' keys.

    An intended null looks like these, and is left out, too.
    """
    padded = [name for name, value in columns.items() if _are_messages(value)]
    unpadded = {**columns, **{name: _unpadded(columns[name]) for name in padded}}
    return _Unpadded(unpadded) if any(_has_null(columns[name]) for name in padded) else unpadded


def _has_null(value: object, *, within: bool = False) -> bool:
    """Return whether a key is null within a call or a tool."""
    if isinstance(value, list):
        return any(_has_null(each, within=within) for each in value)
    if not isinstance(value, dict):
        return value is None and within
    return any(_has_null(each, within=within or name == "function") for name, each in value.items())


def _are_messages(value: object) -> bool:
    """Return whether a value is a list of messages or of tools."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and not first.keys().isdisjoint(_KEYS_OF_MESSAGES)


def _unpadded(value: object) -> object:
    if isinstance(value, list):
        return [_unpadded(each) for each in value]
    if isinstance(value, dict):
        return {name: _unpadded(each) for name, each in value.items() if each is not None}
    return value


def _parse(content: bytes, location: str) -> object:
    try:
        return parse_json(content, location, max_depth=MAX_DEPTH, is_distinct=True)
    except FileError as err:
        raise DataError(str(err)) from err


# Rows of sources that were read before a run, for the run in the same process.
_KEPT: dict[tuple[object, ...], list[Row]] = {}
forget_rows = _KEPT.clear


def read_sources(
    text: str | Path,
    *,
    split: str = "train",
    probabilities: Sequence[float] = (),
    seed: int = 0,
    keeps: bool = False,
) -> list[Row]:
    """Return the rows of one or several sources, in an order fixed by the arguments.

    Without probabilities the sources follow one another. With them, every long enough part of the
    list holds the sources in these proportions. No row comes twice, and the list is as long as
    that allows: from a source with too many rows, the seed draws some.

    Args:
        text: Files, folders or names of data sets, separated by commas.
        split: Split of folders and data sets, see `read_rows`.
        probabilities: Share of each source, with sum 1; empty follows the sizes.
        seed: Seed to draw rows of sources that are not used whole.
        keeps: Whether the next call with these arguments takes over the rows, unless
            `forget_rows` comes before.

    Raises:
        DataError: A source cannot be read, or probabilities do not fit the sources.
    """
    key = (str(text), split, *probabilities, seed)
    rows = _KEPT.pop(key, None) or _mixed_rows(split_sources(str(text)), split, probabilities, seed)
    if keeps:
        _KEPT[key] = rows
    return rows


def _mixed_rows(
    sources: Sequence[str], split: str, probabilities: Sequence[float], seed: int
) -> list[Row]:
    problem = probability_problem(sources, probabilities)
    if problem is not None:
        raise DataError(problem)
    tables = [read_rows(source, split=split) for source in sources]
    if len(tables) == 1 or not probabilities:
        return [row for table in tables for row in table]
    order = mixture_order([len(table) for table in tables], probabilities, seed=seed)
    return [tables[source][row] for source, row in order]


def mixture_order(
    sizes: Sequence[int], probabilities: Sequence[float], *, seed: int
) -> list[tuple[int, int]]:
    """Return the places (source, row) of the longest mixture without repetition.

    The k-th row of source i stands at (k + 1/2) / p_i on a common scale, so that the first n
    places hold n p_i rows of each source, give or take one.

    Args:
        sizes: Rows of each source.
        probabilities: Share of each source, positive.
        seed: Seed to draw rows of sources that are not used whole.
    """
    shares = [Fraction(value).limit_denominator(10**9) for value in probabilities]
    length = min(size / share for size, share in zip(sizes, shares, strict=True))
    marked = []
    for source, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        count = min(size, int(length * share + Fraction(1, 2)))
        rows = sorted(random.Random(f"{seed} {source}").sample(range(size), count))
        half = Fraction(1, 2)
        marked += [((k + half) / share, source, row) for k, row in enumerate(rows)]
    return [(source, row) for _, source, row in sorted(marked)]
