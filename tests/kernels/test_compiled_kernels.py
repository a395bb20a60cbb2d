"""The machine code of every kernel, compiled offline, against the committed table."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from tests.programs import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = BENCHMARKS / "results/compiled_kernels.json"
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
# Shared memory that a program may have; sm_120 has that of a consumer card.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
BLOCK = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_SIZE")
WIDE_STORES = ("grad_products ", "grad_of_stored_products")
WIDE_LOADS = ("forward_partials ", "grad_products ", "fold_products", "grad_of_stored_products")

pytestmark = [
    pytest.mark.shard("strategies"),
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing"),
]


def compile_cases(*arguments):
    process = run_python(
        str(BENCHMARKS / "compile_table.py"),
        "--print",
        *arguments,
        timeout_seconds=3000,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        code=0,
    )
    return [json.loads(line) for line in process.stdout.splitlines()]


def faults(row):
    """What no kernel in a default configuration may have."""
    name = row["case"]
    target = int(name.split()[0].removeprefix("sm_"))
    found = []
    if row["spills"] or row["stack_bytes"]:
        found.append(f"{row['spills']} spills, {row['stack_bytes']} bytes of stack")
    if row["shared_bytes"] > MAX_SHARED_BYTES[target]:
        found.append(f"{row['shared_bytes']} bytes of shared memory")
    has_product = "forward_partials" in name or "grad_products" in name
    if has_product and "bf16" in name and not row["products"].get(PRODUCTS[target]):
        found.append(f"no {PRODUCTS[target]}: {row['products']}")
    if row["bulk_copies"] > 0 or row["bulk_stores"] > 0:
        found.append(f"{row['bulk_copies']} bulk copies, {row['bulk_stores']} bulk stores")
    widths = row["accesses"]
    stores = [w for w in widths if w.startswith("STG")]
    if any(kernel in name for kernel in WIDE_STORES) and stores != ["STG.128"]:
        found.append(f"stores of fewer than 16 bytes: {widths}")
    # Rows that start anywhere cannot be loaded in vectors.
    if "hidden, weight" not in name and any(kernel in name for kernel in WIDE_LOADS):
        if not {"LDG.128", "LDGSTS.128"} & set(widths):
            found.append(f"no load of 16 bytes: {widths}")
        # The bias and the rows' numbers are loaded beside the tile.
        if "bias" not in name and widths.get("LDG.16", 0) > 0:
            found.append(f"loads of single elements: {widths}")
    return found


def read_table():
    return json.loads(TABLE.read_text())


def compare(rows):
    import triton

    table = read_table()
    committed = {row["case"]: row for row in table["rows"]}
    assert {row["case"] for row in rows} <= set(committed)
    for row in rows:
        assert not faults(row), (row["case"], faults(row))
        if table["versions"]["triton"] == triton.__version__:
            expected = committed[row["case"]]
            assert abs(row["registers"] - expected["registers"]) <= 8, row
            for key in set(row) - {"registers", "instructions", "products"}:
                assert row[key] == expected[key], (row["case"], key, row[key], expected[key])


def test_kernels_of_the_committed_table_have_no_fault():
    rows = read_table()["rows"]
    assert len(rows) >= 84
    assert {int(row["case"].split()[0][3:]) for row in rows} == {80, 90, 100, 120}
    for row in rows:
        assert not faults(row), (row["case"], faults(row))


def test_the_table_has_every_case_as_it_is_launched(monkeypatch):
    """Tiles that change without a new table would be noticed without compiling anything."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compile_table

    rows = [row for row in read_table()["rows"] if "bucket.cu" not in row["case"]]
    launched = [
        (
            case.name,
            case.warps,
            case.stages,
            "x".join(str(value) for name, value in case.constants.items() if name in BLOCK),
        )
        for case in compile_table.CASES
    ]
    assert [tuple(row[k] for k in ("case", "warps", "stages", "tile")) for row in rows] == launched
    buckets = {row["case"] for row in read_table()["rows"] if "bucket.cu" in row["case"]}
    assert len(buckets) == 2 * len(compile_table.TARGETS)


def test_the_page_shows_the_table():
    page = (BENCHMARKS / "results/compiled_kernels.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| sm_")]
    rows = read_table()["rows"]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"| {row['case']} | {row['tile']} |")
        assert f"| {row['registers']} | {row['spills']} |" in line


def test_a_spill_and_a_narrow_store_would_be_noticed():
    row = next(r for r in read_table()["rows"] if r["case"] == "sm_90 grad_products bf16 plain")
    assert faults({**row, "spills": 3}) == ["3 spills, 0 bytes of stack"]
    narrow = {**row["accesses"], "STG.16": 64}
    assert "fewer than 16 bytes" in faults({**row, "accesses": narrow})[0]
    assert "no HGMMA" in faults({**row, "products": {"FFMA": 3}})[0]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_kernels_compile_to_the_committed_table():
    rows = compile_cases("--fast")
    assert len(rows) >= 17
    compare(rows)


@pytest.mark.slow
@pytest.mark.timeout(3300)
def test_all_kernels_compile_to_the_committed_table():
    rows = compile_cases()
    assert len(rows) == len([r for r in read_table()["rows"] if "bucket.cu" not in r["case"]])
    compare(rows)
