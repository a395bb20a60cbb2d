"""What cuobjdump says of compiled kernels: registers, spills, instructions, widths of accesses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

# Instructions that multiply matrices, by the start of their names.
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "FFMA", "DMMA")
# Of global memory; LD and ST are generic, where the compiler does not know the address space.
_ACCESS = re.compile(r"^(LDG|STG|LDGSTS|LD|ST)\.(\S+)")
_BITS = {"U16": "16", "S16": "16", "U8": "8", "S8": "8"}
_BUCKET_KERNELS = {True: "with hash", False: "without hash"}
BUCKET_WARPS = 8


def cuobjdump() -> str | None:
    """The one in the path, else Triton's; None without either."""
    spec = importlib.util.find_spec("triton")
    folders = [] if spec is None else spec.submodule_search_locations or []
    inside = [Path(f) / "backends" / "nvidia" / "bin" / "cuobjdump" for f in folders]
    found = [str(path) for path in inside if path.exists()]
    return shutil.which("cuobjdump") or next(iter(found), None)


def run_cuobjdump(option: str, path: Path) -> str:
    """Its output for a cubin."""
    command = [cuobjdump(), option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_usage(usage: str) -> dict[str, int]:
    """Registers of a thread, bytes of its stack and of shared memory: a line of resource usage."""
    line = usage.strip().splitlines()[-1]
    found = {name: re.search(rf"\b{name}:(\d+)", line) for name in ("REG", "STACK", "SHARED")}
    return {
        "registers": int(found["REG"].group(1)),
        "stack_bytes": int(found["STACK"].group(1)),
        "shared_bytes": int(found["SHARED"].group(1)),
    }


def read_code(code: str) -> dict[str, object]:
    """Counts of instructions, from cuobjdump -sass."""
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.M)
    accesses: Counter[str] = Counter()
    for opcode in opcodes:
        match = _ACCESS.match(opcode)
        if match:
            kind, rest = match.groups()
            width = re.search(r"\b(128|64|U16|S16|U8|S8)\b", rest)
            size = "32" if width is None else _BITS.get(width.group(1), width.group(1))
            accesses[f"{kind}.{size}"] += 1
    stems = Counter(opcode.split(".")[0] for opcode in opcodes)
    return {
        "products": {name: stems[name] for name in PRODUCTS if stems[name]},
        "accesses": dict(sorted(accesses.items())),
        "spills": stems["STL"],
        "bulk_copies": stems["UTMALDG"],
        "bulk_stores": stems["UTMASTG"],
        "instructions": len(opcodes),
    }


def nvcc_version() -> str | None:
    """Release of the CUDA compiler in the path, None without one."""
    if shutil.which("nvcc") is None:
        return None
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text).group(1)


def compile_bucket(csrc: Path, folder: Path, target: int) -> list[dict[str, object]]:
    """Rows of the table for the kernels of bucket.cu on sm_`target`; needs nvcc and cuobjdump."""
    cubin = folder / f"bucket_{target}.cubin"
    subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-O3",
            f"-gencode=arch=compute_{target},code=sm_{target}",
            "-cubin",
            "-o",
            str(cubin),
            str(csrc / "bucket.cu"),
        ],
        capture_output=True,
        timeout=580,
        check=True,
    )
    usage, code = run_cuobjdump("--dump-resource-usage", cubin), run_cuobjdump("-sass", cubin)
    rows = []
    for part in code.split("Function : ")[1:]:
        symbol = part.split("\n", 1)[0].strip()
        resources = usage.split(f"Function {symbol}:")[1].strip().splitlines()[0]
        rows.append(
            {
                "case": f"sm_{target} bucket.cu {_BUCKET_KERNELS['ILb1E' in symbol]}",
                "tile": "-",
                "warps": BUCKET_WARPS,
                "stages": "-",
                **read_usage(resources),
                **read_code(part),
            }
        )
    return sorted(rows, key=lambda row: row["case"])
