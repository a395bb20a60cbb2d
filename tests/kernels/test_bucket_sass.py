"""What the compiler makes of csrc/bucket.cu: registers, spills and the widths of its accesses."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.shard("strategies")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = BENCHMARKS / "results/compiled_kernels.json"
TARGETS = (80, 90, 100, 120)
REGISTERS_OF_A_MULTIPROCESSOR = 65536
BLOCKS = {"with hash": 2, "without hash": 3}


@pytest.fixture
def machine_code(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import machine_code

    if machine_code.nvcc_version() is None or machine_code.cuobjdump() is None:
        pytest.skip("no nvcc or no cuobjdump")
    return machine_code


def check(row):
    """What the kernels of bucket.cu may need, and how wide they have to load and store."""
    kernel = row["case"].split("bucket.cu ")[1]
    limit = REGISTERS_OF_A_MULTIPROCESSOR // (32 * row["warps"] * BLOCKS[kernel])
    assert row["registers"] <= limit // 8 * 8, row
    assert row["stack_bytes"] == row["spills"] == 0, row
    loads = widths(row, "LD")
    stores = widths(row, "ST")
    # Eight operations: four steps and the remainder of aligned sources, two steps and the
    # remainder of shifted ones. Narrow stores serve the ends of a run alone, two places each.
    assert stores[128] == 8 * (4 + 1 + 2 + 1), row
    assert sum(n for width, n in stores.items() if width < 128) == 8 * 2, row
    # A source vector has 16 bytes, 32 for the two that narrow, 8 for the two that widen, and a
    # shifted one half or the whole of that again: of 64-bit elements one is enough. Rows of
    # keys and of the table come on top.
    copies = 3 * (5 + 2 * 3) + (5 + 3)
    assert loads[128] >= copies + 2 * (2 * 5 + 3 * 3), row
    assert loads[64] >= 2 * (5 + 2 * 3) + 3, row


def widths(row, kind):
    """Instructions by width in bits, generic ones and those of global memory together."""
    found = {}
    for access, count in row["accesses"].items():
        name, bits = access.split(".")
        if name in (kind, f"{kind}G"):
            found[int(bits)] = found.get(int(bits), 0) + count
    return found


def read_table():
    return json.loads(TABLE.read_text())


def test_rows_of_the_committed_table_fit_their_registers_and_move_16_bytes_at_a_time():
    rows = [row for row in read_table()["rows"] if "bucket.cu" in row["case"]]
    assert len(rows) == len(BLOCKS) * len(TARGETS)
    for row in rows:
        check(row)
    with pytest.raises(AssertionError):
        check({**rows[0], "spills": 1})
    with pytest.raises(AssertionError):
        check({**rows[0], "accesses": {**rows[0]["accesses"], "ST.16": 99}})


@pytest.mark.full
@pytest.mark.parametrize(
    "target", [t if t == 90 else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS]
)
def test_kernels_compile_to_the_committed_table(repository, machine_code, tmp_path, target):
    rows = machine_code.compile_bucket(repository / "packages/kernels/csrc", tmp_path, target)
    assert len(rows) == len(BLOCKS)
    table = read_table()
    committed = {row["case"]: row for row in table["rows"]}
    for row in rows:
        check(row)
        if table["versions"]["nvcc"] == machine_code.nvcc_version():
            assert row == committed[row["case"]]
