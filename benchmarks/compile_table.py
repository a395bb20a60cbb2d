"""Compiles every kernel for GPUs that are not here, and says what the machine code is like.

    python benchmarks/compile_table.py            # writes the committed table
    python benchmarks/compile_table.py --print [--fast]    # JSON to stdout, for the tests

ptxas and cuobjdump come with Triton. `CASES` is the one list: a kernel in each configuration that a
default call of `linear_logprob` reaches. `--fast` takes the cases that the default tests compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightrft.kernels.logprob import triton_kernels, triton_launch
from lightrft.kernels.logprob.triton_launch import TileConfig

RESULTS = Path(__file__).parent / "results"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Shared memory that one program may have; sm_120 has that of a consumer card.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Instructions that multiply matrices, by the start of their names.
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "FFMA", "DMMA")
_ACCESS = re.compile(r"^(LDG|STG|LDGSTS)\.(\S+)")
_FLOATS = {
    "maximum", "log_sum", "logprobs", "entropy", "grad_logprobs", "grad_entropy", "partials",
    "maximum_out", "exp_sum_out", "weighted_sum_out", "centre",
}  # fmt: skip
# Counts that the launcher hides from the specialisation (see COUNTS in triton_kernels) never are.
_ALIGNED = _FLOATS | {
    "hidden", "weight", "bias", "products", "out",
    "targets", "size", "stride_h", "stride_w", "stride_out", "stride", "num_columns", "num_padded",
    "num_rows",
}  # fmt: skip


TARGETS = (80, 90, 100, 120)
_FEATURES = {
    "bias": "HAS_BIAS", "softcap": "HAS_SOFTCAP", "centre": "HAS_CENTRE",
    "entropy": "NEEDS_ENTROPY", "entropy-gradient": "HAS_GRAD_ENTROPY",
}  # fmt: skip
_LAST_COLUMNS = ("num_columns",)
_NO_ALIGNMENT = ("hidden", "weight", "size", "stride_h", "stride_w")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel as it is launched.

    Args:
        kernel: Its name in triton_kernels.
        target: Compute capability times ten.
        features: Of `_FEATURES`, separated by spaces.
        element: Dtype of its operands.
        warps, stages: Of a program.
        constants: Compile-time arguments besides the features.
        unaligned: Arguments that are no multiples of 16 here.
        stored: Dtype of `out`, if another.
        is_fast: Compiled by the default tests.
    """

    kernel: str
    target: int
    features: str
    element: str
    warps: int
    stages: int
    constants: dict[str, object] = field(hash=False)
    unaligned: tuple[str, ...] = ()
    stored: str = "bf16"
    is_fast: bool = False

    @property
    def name(self) -> str:
        """What its row of the table is called."""
        odd = f" ({', '.join(self.unaligned)} not aligned)" if self.unaligned else ""
        return f"sm_{self.target} {self.kernel} {self.element} {self.features or 'plain'}{odd}"

    def all_constants(self, names: list[str]) -> dict[str, object]:
        """Every compile-time argument of the kernel."""
        asked = self.features.split()
        flags = {flag: feature in asked for feature, flag in _FEATURES.items()}
        every = {"UPCAST": False, "HAS_GRAD_LOGPROB": True, **flags, **self.constants}
        return {name: value for name, value in every.items() if name in names}


def _of_tiles(kernel: str, target: int, features: str, tiles: TileConfig, **options) -> Case:
    constants = {
        "BLOCK_ROWS": tiles.block_rows, "BLOCK_COLUMNS": tiles.block_columns,
        "BLOCK_SIZE": tiles.block_size, "TILES_PER_SPLIT": tiles.tiles_per_split,
        "GROUP": tiles.group, "WARP_SPECIALIZE": tiles.is_specialized,
    }  # fmt: skip
    options = {"element": "bf16", **options}
    return Case(
        kernel, target, features, warps=tiles.num_warps, stages=tiles.num_stages,
        constants=constants, **options,
    )  # fmt: skip


def _products(target: int) -> list[Case]:
    """Kernels with a product: the fused forward pass, and the gradient of recomputed products."""
    capability = divmod(target, 10)
    cases = []
    for features in ("", "entropy", "bias softcap entropy"):
        is_plain = "bias" not in features
        tiles = triton_launch.plain_tiles(capability, is_half=True, is_aligned=True)
        cases.append(_of_tiles("forward_partials", target, features, tiles, is_fast=target == 80))
        bulk = triton_launch.bulk_tiles(
            capability, triton_launch.triton_version(), is_plain=is_plain
        )
        cases += [
            _of_tiles("forward_partials_tma", target, features, t, is_fast=True) for t in bulk
        ]
    for features in ("", "bias", "entropy-gradient", "bias softcap entropy-gradient"):
        tiles = triton_launch.gradient_tiles(
            capability, is_half=True, is_aligned=True, is_plain=not features
        )
        cases.append(_of_tiles("grad_products", target, features, tiles, is_fast=target == 90))
    tiles = triton_launch.gradient_tiles(capability, is_half=True, is_aligned=True, is_plain=True)
    # The last chunk of an odd vocabulary; any number of rows has a gradient.
    cases += [
        _of_tiles("grad_products", target, "", tiles, unaligned=odd, is_fast=target == 90)
        for odd in (_LAST_COLUMNS, ("num_rows",))
    ]
    most = "bias softcap entropy entropy-gradient"
    for kernel in ("forward_partials", "grad_products"):
        cases.append(
            _of_tiles(
                kernel, target, most,
                triton_launch.plain_tiles(capability, is_half=True, is_aligned=False),
                unaligned=_NO_ALIGNMENT,
                is_fast=target == 90,
            )
        )  # fmt: skip
        cases.append(
            _of_tiles(
                kernel,
                target,
                most,
                triton_launch.plain_tiles(capability, is_half=False, is_aligned=True),
                element="fp32",
                stored="fp32",
            )
        )
    return cases


def _epilogues(target: int) -> list[Case]:
    """Kernels without a product: passes over stored ones, merges, targets."""
    cases = []

    def add(kernel: str, features: str, constants: dict[str, int], **options) -> None:
        options = {"element": "fp32", "is_fast": target == 90, **options}
        cases.append(
            Case(kernel, target, features, warps=4, stages=3, constants=constants, **options)
        )

    block = triton_launch.EPILOGUE_BLOCK
    for features, element in (
        ("", "fp32"), ("bias softcap entropy", "fp32"), ("centre bias entropy", "bf16")
    ):  # fmt: skip
        split = {**block, "COLUMNS_PER_SPLIT": triton_launch.COLUMNS_PER_SPLIT}
        add("fold_products", features, split, element=element)
        gradient = features.replace("entropy", "entropy-gradient")
        add("grad_of_stored_products", gradient, block, element=element)
    add("merge_partials", "entropy", triton_launch.MERGE_BLOCK)
    add("target_products", "", triton_launch.TARGET_BLOCK, element="bf16")
    return cases


CASES = [case for target in TARGETS for case in (*_products(target), *_epilogues(target))]


def _argument_type(name: str, case: Case) -> str:
    block = case.constants
    if case.kernel.endswith("_tma") and name in ("hidden", "weight"):
        rows = block["BLOCK_ROWS" if name == "hidden" else "BLOCK_COLUMNS"]
        return f"tensordesc<{case.element}[{rows}, {block['BLOCK_SIZE']}]>"
    if name in ("hidden", "weight", "bias", "products"):
        return f"*{case.element}"
    if name == "out":
        return "*fp32" if case.kernel == "target_products" else f"*{case.stored}"
    if name in _FLOATS:
        return "*fp32"
    if name in ("scale", "softcap"):
        return "fp32"
    return "*i64" if name == "targets" else "i32"


def compile_case(case: Case) -> dict[str, object]:
    """A row of the table: what ptxas made of one kernel."""
    kernel = getattr(triton_kernels, case.kernel)
    names = kernel.arg_names
    constants = case.all_constants(names)
    signature = {
        name: "constexpr" if name in constants else _argument_type(name, case) for name in names
    }
    aligned = [
        index
        for index, (name, parameter) in enumerate(zip(names, kernel.params, strict=True))
        if name in _ALIGNED
        and name not in case.unaligned
        and not parameter.do_not_specialize
        and "tensordesc" not in signature[name]
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", case.target, 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    block = [
        case.constants[name]
        for name in ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_SIZE")
        if name in case.constants
    ]
    return {
        "case": case.name,
        "tile": "x".join(str(size) for size in block),
        "warps": case.warps,
        "stages": case.stages,
        **read_usage(usage),
        "shared_bytes": compiled.metadata.shared,
        **read_code(code),
    }


def read_usage(usage: str) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, from cuobjdump --dump-resource-usage."""
    line = usage.strip().splitlines()[-1]
    return {
        "registers": int(re.search(r"REG:(\d+)", line).group(1)),
        "stack_bytes": int(re.search(r"STACK:(\d+)", line).group(1)),
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
            bits = {"U16": "16", "S16": "16", "U8": "8", "S8": "8"}
            size = "32" if width is None else bits.get(width.group(1), width.group(1))
            accesses[f"{kind}.{size}"] += 1
    stems = Counter(opcode.split(".")[0] for opcode in opcodes)
    return {
        "products": {name: stems[name] for name in PRODUCTS if stems[name]},
        "accesses": dict(sorted(accesses.items())),
        "spills": stems["STL"],
        "bulk_copies": stems["UTMALDG"],
        "instructions": len(opcodes),
    }


def _cuobjdump(option: str, path: str) -> str:
    command = [str(TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def to_markdown(rows: list[dict[str, object]]) -> str:
    """The table as a document."""

    def counts(found: dict[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in found.items()) or "-"

    lines = [
        "# Compiled kernels",
        "",
        "Machine code of the kernels of `linear_logprob`, compiled offline for GPUs that are not",
        "here: `python benchmarks/compile_table.py` writes this page and",
        "[compiled_kernels.json](compiled_kernels.json); `tests/kernels/test_compiled_kernels.py`",
        f"compares them. Triton {triton.__version__}, its own ptxas. Registers are per thread,",
        "spills are stores to local memory (STL), widths of global accesses are in bits; FFMA are",
        "not products of matrices but the arithmetic around them.",
        "",
        "| kernel | tile | warps, stages | registers | spills | shared memory | products | bulk"
        " copies | global accesses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {row['case']} | {row['tile']} | {row['warps']}, {row['stages']} | "
            f"{row['registers']} | {row['spills']} | {row['shared_bytes']:,} | "
            f"{counts(row['products'])} | {row['bulk_copies']} | {counts(row['accesses'])} |"
        )
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="one JSON line for each case")
    parser.add_argument("--fast", action="store_true", help="the cases of the default tests")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""],
        help="compile the cases whose name contains one of these; other rows stay as they are",
    )  # fmt: skip
    arguments = parser.parse_args()
    cases = [
        case
        for case in CASES
        if any(text in case.name for text in arguments.only)
        and (case.is_fast or not arguments.fast)
    ]
    if arguments.print:
        for case in cases:
            sys.stdout.write(json.dumps(compile_case(case)) + "\n")
            sys.stdout.flush()
        return
    known: dict[str, dict[str, object]] = {}
    if arguments.only != [""]:
        rows = json.loads((RESULTS / "compiled_kernels.json").read_text())["rows"]
        known = {row["case"]: row for row in rows}
    known.update((case.name, compile_case(case)) for case in cases)
    rows = [known[case.name] for case in CASES]
    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    table = {"versions": versions, "rows": rows}
    (RESULTS / "compiled_kernels.json").write_text(json.dumps(table, indent=1) + "\n")
    (RESULTS / "compiled_kernels.md").write_text(to_markdown(rows))


if __name__ == "__main__":
    main()
