"""Files are read back within bounds, as the types say, or refused in one line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from lightrft.config.files import (
    FileEntry,
    FileError,
    parse_json,
    read_bytes,
    read_object,
    sealed,
    typed,
    unsealed,
)


@dataclass(frozen=True)
class Part:
    ids: tuple[int, ...]
    kind: Literal["a", "b"] = "a"

    def __post_init__(self):
        if len(self.ids) > 3:
            raise ValueError("it has too many ids")


@dataclass(frozen=True)
class Whole:
    name: str
    share: float | None
    parts: list[Part]
    more: Mapping[str, Part] = field(default_factory=dict)


GOOD = {"name": "n", "share": 1, "parts": [{"ids": [1, 2]}], "more": {"x": {"ids": []}}}


def test_records_are_made_of_what_json_has():
    made = typed(Whole, json.loads(json.dumps(GOOD)), "f")
    assert made == Whole("n", 1.0, [Part((1, 2))], {"x": Part(())})
    assert typed(Whole, {**GOOD, "share": None}, "f").share is None
    assert typed(Whole, {**GOOD, "old": 1}, "f", skips_unknown=True) == made


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": 7}, "f: name: got 7, expected str"),
        ({"share": True}, "f: share: got True, expected float"),
        ({"share": 10**30}, "f: share: got 1000"),
        ({"parts": {}}, "f: parts: got {}, expected a list"),
        ({"parts": [[]]}, r"f: parts\[0\]: expected an object with names, got a list"),
        ({"parts": [{"ids": [1, "2"]}]}, r"f: parts\[0\]: ids\[1\]: got '2', expected int"),
        ({"parts": [{"ids": [1] * 4}]}, r"f: parts\[0\]: it has too many ids"),
        ({"parts": [{"ids": [], "kind": "c"}]}, "kind: got 'c', expected Literal"),
        ({"more": {"x": {}}}, "f: more.x lacks 'ids'"),
        ({"x\x1b": 1}, r"f has unknown 'x\\x1b'"),
    ],
)
def test_what_has_another_type_is_named_by_its_place(change, message):
    with pytest.raises(FileError, match=message):
        typed(Whole, {**GOOD, **change}, "f")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[" * 10**5, "nested deeper"),
        (b"[" * 201 + b"]" * 201, "nested deeper than 200"),
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"9" * 5000, "too many digits"),
        (b'"\\ud800"', "half of a surrogate pair"),
    ],
)
def test_what_is_no_json_is_one_line(content, message):
    with pytest.raises(FileError, match=message) as caught:
        parse_json(content, "f.json")
    assert "\n" not in str(caught.value)


def test_files_are_bounded_and_regular(tmp_path):
    path = tmp_path / "f"
    for expected in ("does not exist", "is a folder"):
        with pytest.raises(FileError, match=expected):
            read_bytes(path)
        path.mkdir(exist_ok=True)
    (tmp_path / "g").write_bytes(b"1234")
    assert read_bytes(tmp_path / "g", max_bytes=4) == b"1234"
    with pytest.raises(FileError, match="more than 3 bytes"):
        read_bytes(tmp_path / "g", max_bytes=3)
    maps = Path("/proc/self/maps")  # says that it is empty
    assert len(read_bytes(maps)) > 100
    with pytest.raises(FileError, match="more than 100 bytes"):
        read_bytes(maps, max_bytes=100)
    with pytest.raises(FileError, match="got a number"):
        read_object(tmp_path / "g")


def test_a_sealed_object_comes_back_and_another_one_does_not():
    text = sealed({"a": 1, "b": [2]})
    assert unsealed(json.loads(text), "f") == {"a": 1, "b": [2]}
    assert sealed(json.loads(text)) == text
    with pytest.raises(FileError, match="does not match its own SHA-256"):
        unsealed({**json.loads(text), "a": 2}, "f")


def test_an_entry_says_how_its_file_differs_and_leads_nowhere_else(tmp_path):
    (tmp_path / "a").write_text("one")
    entry = FileEntry.of(tmp_path, "a")
    assert entry.damage(tmp_path) is None
    (tmp_path / "a").write_text("two")
    assert entry.damage(tmp_path) == "a does not match its SHA-256"
    for name in ("../a", "/a", "a//b", ".", "a\0"):
        with pytest.raises(ValueError, match="is no file below its folder"):
            FileEntry(name, 1, "")
