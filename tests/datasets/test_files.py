"""Reading rows, and saying where a bad one stands."""

import pytest
from tests.datasets.row_files import inputs

from lightrft.datasets import DataError, Row, read_rows
from lightrft.datasets.files import scan_rows

ROWS = [{"input": "one\u2028two", "n": 1}, {"input": "three", "n": None}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_the_three_formats_hold_the_same_rows(name, write):
    path = write(name, ROWS)
    rows = read_rows(path)
    assert [dict(row.columns) for row in rows] == ROWS
    places = (
        [f"{path}:1", f"{path}:2"] if name == "a.jsonl" else [f"{path}, row {i}" for i in (1, 2)]
    )
    assert [row.location for row in rows] == places


def test_a_separator_inside_a_string_does_not_end_a_line(write):
    path = write("a.jsonl", '{"input": "one\u2028two\x85"}\n\n{"input": "x"}')
    assert inputs(path) == ["one\u2028two\x85", "x"]
    assert [row.location for row in read_rows(path)] == [f"{path}:1", f"{path}:3"]


def test_a_byte_order_mark_is_not_part_of_the_first_row(write):
    for name, text in (("a.jsonl", '\ufeff{"input": "x"}\n'), ("a.json", '\ufeff[{"input": "x"}]')):
        assert read_rows(write(name, text))[0].columns == {"input": "x"}


def test_a_table_of_comma_separated_values_has_texts_numbers_and_labels(write):
    text = '\ufeffprompt,completion,label,score\n2+2=,4,true,0.5\n"a, ""b""\nc",05,false,1\n\n'
    rows = read_rows(write("a.csv", text))
    assert [row.columns for row in rows] == [
        {"prompt": "2+2=", "completion": "4", "label": True, "score": 0.5},
        {"prompt": 'a, "b"\nc', "completion": "05", "label": False, "score": 1.0},
    ]
    assert rows[1].location.endswith("a.csv:4")


def test_a_parquet_column_that_comes_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [pyarrow.array([text]) for text in ("a", "b")]
    table = pyarrow.Table.from_arrays(texts, names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has 'prompt' twice"):
        read_rows(tmp_path / "a.parquet")


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "x"}\n{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not UTF-8: invalid start byte at byte 11"):
        read_rows(path)


def test_a_missing_file_names_what_is_possible(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "none.jsonl", "data/none", "none", "owner/none.jsonl", "../none"):
        with pytest.raises(DataError, match=r"none\S* does not exist: .*\.jsonl.*owner/name"):
            read_rows(path)


def test_a_folder_may_keep_its_files_in_data(write, tmp_path):
    write("d/data/train-00000-of-1.jsonl", [{"input": "a"}])
    assert inputs(tmp_path / "d") == ["a"]


def test_a_scan_goes_on_after_a_malformed_row(write):
    text = '{"input": "x"}\n{"input": \n\n3\n{"input": "y"}\n'
    found = list(scan_rows(write("a.jsonl", text)))
    assert [type(item) for item in found] == [Row, DataError, DataError, Row]
    assert [item.location.rsplit(":")[-1] for item in found if isinstance(item, Row)] == ["1", "5"]


def test_a_folder_holds_splits_in_one_file_or_several(write, tmp_path):
    write("d/train-00000-of-2.parquet", [{"input": "a"}])
    write("d/train-00001-of-2.parquet", [{"input": "b"}])
    write("d/test.jsonl", [{"input": "c"}])
    assert inputs(tmp_path / "d") == ["a", "b"]
    assert inputs(tmp_path / "d", split="test") == ["c"]
    with pytest.raises(
        DataError, match=r"no split 'eval'.*eval\.jsonl.*found test\.jsonl, train-0"
    ):
        read_rows(tmp_path / "d", split="eval")


def test_a_small_parquet_file_of_many_rows_is_refused_before_they_are_made(tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.array(["x" * 1000] * 20_000).dictionary_encode()
    parquet.write_table(arrow.table({"input": rows}), tmp_path / "d.parquet")
    assert len(read_rows(tmp_path / "d.parquet")) == 20_000
    monkeypatch.setattr("lightrft.datasets.files.MIN_PARQUET_BYTES", 2**20)
    with pytest.raises(DataError, match="at most 1000 times the size"):
        read_rows(tmp_path / "d.parquet")
