"""What the compiler makes of csrc/bucket.cu: registers, spills and the widths of its accesses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

TARGETS = (80, 90, 100, 120)
REGISTERS_OF_A_MULTIPROCESSOR = 65536
THREADS = 256
BLOCKS = {"with hash": 2, "without hash": 3}


def cuobjdump() -> str | None:
    """The one in the path, else Triton's."""
    spec = importlib.util.find_spec("triton")
    folders = [] if spec is None else spec.submodule_search_locations or []
    inside = [Path(f) / "backends" / "nvidia" / "bin" / "cuobjdump" for f in folders]
    found = [str(path) for path in inside if path.exists()]
    return shutil.which("cuobjdump") or next(iter(found), None)


def compile_rows(csrc: Path, folder: Path, target: int) -> list[dict[str, object]]:
    """One row for each kernel of bucket.cu on sm_`target`; needs nvcc and cuobjdump, no GPU.

    Returns:
        kernel, target, registers, stack_bytes, num_spills (local loads and stores), and
        instructions that load and store global memory, counted by width in bits.
    """
    cubin = folder / f"bucket_{target}.cubin"
    subprocess.run(
        ["nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{target},code=sm_{target}",
         "-cubin", "-o", str(cubin), str(csrc / "bucket.cu")],
        capture_output=True, timeout=280, check=True,
    )  # fmt: skip
    usage, sass = (
        subprocess.run(
            [cuobjdump(), option, str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        for option in ("--dump-resource-usage", "-sass")
    )
    rows = []
    for part in sass.split("Function : ")[1:]:
        name = part.split("\n", 1)[0].strip()
        resources = usage.split(f"Function {name}:")[1].strip().splitlines()[0]
        accesses: dict[str, Counter[int]] = {"LD": Counter(), "ST": Counter()}
        for kind, details in re.findall(r"\b(LD|ST)G?\.(\S+)", part):
            words = details.split(".")
            widths = [int(w.lstrip("US")) for w in words if re.fullmatch(r"[US]?(8|16|64|128)", w)]
            accesses[kind][widths[0] if widths else 32] += 1
        rows.append(
            {
                "kernel": "with hash" if "ILb1E" in name else "without hash",
                "target": target,
                "registers": int(re.search(r"REG:(\d+)", resources).group(1)),
                "stack_bytes": int(re.search(r"STACK:(\d+)", resources).group(1)),
                "num_spills": len(re.findall(r"\b(?:STL|LDL)\b", part)),
                "loads": dict(accesses["LD"]),
                "stores": dict(accesses["ST"]),
            }
        )
    return rows


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize(
    "target", [t if t == 90 else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS]
)
def test_kernels_fit_their_registers_and_move_16_bytes_at_a_time(repository, tmp_path, target):
    rows = compile_rows(repository / "packages" / "kernels" / "csrc", tmp_path, target)
    assert sorted(row["kernel"] for row in rows) == ["with hash", "without hash"]
    for row in rows:
        limit = REGISTERS_OF_A_MULTIPROCESSOR // (THREADS * BLOCKS[row["kernel"]])
        assert row["registers"] <= limit // 8 * 8, row
        assert row["stack_bytes"] == row["num_spills"] == 0, row
        # Eight operations: four steps and the remainder of aligned sources, two steps and the
        # remainder of shifted ones. Narrow stores serve the ends of a run alone, two places each.
        assert row["stores"][128] == 8 * (4 + 1 + 2 + 1), row
        assert sum(n for width, n in row["stores"].items() if width < 128) == 8 * 2, row
        # A source vector has 16 bytes, 32 for the two that narrow, 8 for the two that widen, and a
        # shifted one half or the whole of that again: of 64-bit elements one is enough. Rows of
        # keys and of the table come on top.
        copies = 3 * (5 + 2 * 3) + (5 + 3)
        assert row["loads"][128] >= copies + 2 * (2 * 5 + 3 * 3), row
        assert row["loads"][64] >= 2 * (5 + 2 * 3) + 3, row
