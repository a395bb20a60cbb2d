"""Compiles every kernel for GPUs that are not here, and says what the machine code is like.

    python benchmarks/compile_table.py            # writes the committed table
    python benchmarks/compile_table.py --print [--fast]    # JSON to stdout, for the tests

ptxas and cuobjdump come with Triton; bucket.cu needs nvcc. `CASES` is the one list of Triton's: a
kernel in each configuration that a call of `linear_logprob` reaches. `--fast` takes the cases that
the default tests compile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import machine_code
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightrft.kernels.logprob import triton_kernels, triton_launch
from lightrft.kernels.logprob.triton_launch import TileConfig

RESULTS = Path(__file__).parent / "results"
CSRC = Path(__file__).parents[1] / "packages" / "kernels" / "csrc"
# Shared memory that one program may have; sm_120 has that of a consumer card.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_FLOATS = {
    "maximum",
    "log_sum",
    "entropy",
    "grad_logprobs",
    "grad_entropy",
    "partials",
    "maximum_out",
    "exp_sum_out",
    "weighted_sum_out",
}
# Counts that the launcher hides from the specialisation (see COUNTS in triton_kernels) never are.
_ALIGNED = _FLOATS | {
    "hidden",
    "weight",
    "bias",
    "products",
    "out",
    "targets",
    "size",
    "stride_h",
    "stride_w",
    "stride_out",
    "stride",
    "num_columns",
    "num_padded",
    "num_rows",
}


TARGETS = (80, 90, 100, 120)
_FEATURES = {
    "bias": "HAS_BIAS",
    "softcap": "HAS_SOFTCAP",
    "entropy": "NEEDS_ENTROPY",
    "entropy-gradient": "HAS_GRAD_ENTROPY",
}
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
        every = {"HAS_GRAD_LOGPROB": True, **flags, **self.constants}
        return {name: value for name, value in every.items() if name in names}


def _of_tiles(kernel: str, target: int, features: str, tiles: TileConfig, **options) -> Case:
    constants = {
        "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_COLUMNS": tiles.block_columns,
        "BLOCK_SIZE": tiles.block_size,
        "TILES_PER_SPLIT": tiles.tiles_per_split,
        "GROUP": tiles.group,
    }
    options = {"element": "bf16", **options}
    return Case(
        kernel,
        target,
        features,
        warps=tiles.num_warps,
        stages=tiles.num_stages,
        constants=constants,
        **options,
    )


def _products(target: int) -> list[Case]:
    """Kernels with a product: the fused forward pass, and the gradient of recomputed products."""
    capability = divmod(target, 10)
    cases = []
    for features in ("", "entropy", "bias softcap entropy"):
        tiles = triton_launch.plain_tiles(capability, is_half=True, is_aligned=True)
        cases.append(_of_tiles("forward_partials", target, features, tiles, is_fast=target == 80))
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
                kernel,
                target,
                most,
                triton_launch.plain_tiles(capability, is_half=True, is_aligned=False),
                unaligned=_NO_ALIGNMENT,
                is_fast=target == 90,
            )
        )
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
    for features in ("", "bias softcap entropy"):
        split = {**block, "COLUMNS_PER_SPLIT": triton_launch.COLUMNS_PER_SPLIT}
        add("fold_products", features, split)
        add("grad_of_stored_products", features.replace("entropy", "entropy-gradient"), block)
    add("merge_partials", "entropy", triton_launch.MERGE_BLOCK)
    add("target_products", "", triton_launch.TARGET_BLOCK, element="bf16")
    return cases


CASES = [case for target in TARGETS for case in (*_products(target), *_epilogues(target))]


def _argument_type(name: str, case: Case) -> str:
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
        if name in _ALIGNED and name not in case.unaligned and not parameter.do_not_specialize
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", case.target, 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = machine_code.run_cuobjdump("--dump-resource-usage", Path(file.name))
        code = machine_code.run_cuobjdump("-sass", Path(file.name))
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
        **machine_code.read_usage(usage),
        "shared_bytes": compiled.metadata.shared,
        **machine_code.read_code(code),
    }


def compile_buckets() -> list[dict[str, object]]:
    """Rows of bucket.cu for all targets."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            row
            for target in TARGETS
            for row in machine_code.compile_bucket(CSRC, Path(folder), target)
        ]


def to_markdown(versions: dict[str, str], rows: list[dict[str, object]]) -> str:
    """The table as a document."""

    def counts(found: dict[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in found.items()) or "-"

    lines = [
        "# Compiled kernels",
        "",
        "Machine code of the kernels of `linear_logprob` and of the weight buckets, compiled",
        "offline for GPUs that are not here: `python benchmarks/compile_table.py` writes this page",
        "and [compiled_kernels.json](compiled_kernels.json), which `test_compiled_kernels.py` and",
        "`test_bucket_sass.py` in `tests/kernels` compare with what they compile.",
        f"Triton {versions['triton']} and its own ptxas; nvcc {versions['nvcc']} for bucket.cu.",
        "Registers are per thread, spills are stores to local memory (STL), widths of global",
        "accesses are in bits, bulk copies are loads / stores; FFMA are not products of matrices",
        "but the arithmetic around them.",
        "",
        "| kernel | tile | warps, stages | registers | spills | shared memory | products | bulk"
        " copies | global accesses |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        (
            f"| {row['case']} | {row['tile']} | {row['warps']}, {row['stages']} | "
            f"{row['registers']} | {row['spills']} | {row['shared_bytes']:,} | "
            f"{counts(row['products'])} | {row['bulk_copies']} / {row['bulk_stores']} | "
            f"{counts(row['accesses'])} |"
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
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="compile the cases whose name contains one of these; other rows stay as they are",
    )
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
    path = RESULTS / "compiled_kernels.json"
    known: dict[str, dict[str, object]] = {}
    nvcc = machine_code.nvcc_version()
    if arguments.only != [""] or nvcc is None:
        table = json.loads(path.read_text())
        known = {row["case"]: row for row in table["rows"]}
        nvcc = nvcc or table["versions"]["nvcc"]
    known.update((case.name, compile_case(case)) for case in cases)
    if machine_code.nvcc_version() is not None and any(t in "bucket.cu" for t in arguments.only):
        known.update((row["case"], row) for row in compile_buckets())
    buckets = sorted(name for name in known if "bucket.cu" in name)
    buckets.sort(key=lambda name: TARGETS.index(int(name.split()[0].removeprefix("sm_"))))
    rows = [known[name] for name in (*(case.name for case in CASES), *buckets)]
    versions = {
        "triton": triton.__version__,
        "torch": torch.__version__.split("+")[0],
        "nvcc": nvcc,
    }
    path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    (RESULTS / "compiled_kernels.md").write_text(to_markdown(versions, rows))


if __name__ == "__main__":
    main()
