"""Compiles every Triton kernel with a product for three GPUs; prints one JSON line for each.

Needs no GPU: ptxas and cuobjdump come with Triton. Run by test_triton.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightrft.kernels.logprob import triton_kernels, triton_launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
FLOATS = ("maximum", "log_sum", "logprobs", "entropy", "grad_logprobs", "grad_entropy", "partials")
POINTERS = ("hidden", "weight", "bias", "out")
ALIGNED = (*POINTERS, "partials", "size", "stride_h", "stride_w", "stride_out")


def argument_type(name: str, element: str) -> str:
    if name in FLOATS:
        return "*fp32"
    if name in POINTERS:
        return f"*{element}"
    if name in ("scale", "softcap"):
        return "fp32"
    return "*i64" if name == "targets" else "i32"


def compile_kernel(kernel, target, config, constants, element) -> dict[str, object]:
    types = {}
    for name in kernel.arg_names:
        types[name] = "constexpr" if name in constants else argument_type(name, element)
    if config.uses_tma:
        for name, rows in (("hidden", config.block_rows), ("weight", config.block_columns)):
            types[name] = f"tensordesc<{element}[{rows}, {config.block_size}]>"
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [n for n in ALIGNED if n in position and "tensordesc" not in types[n]]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = cuobjdump("--dump-resource-usage", file.name).strip().splitlines()[-1]
        num_spills = len(re.findall(r"\bSTL\b", cuobjdump("-sass", file.name)))
    ptx = compiled.asm["ptx"]
    instruction = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[target]
    return {
        "kernel": kernel.__name__,
        "target": target,
        "element": element,
        "entropy": constants.get("NEEDS_ENTROPY", constants.get("HAS_GRAD_ENTROPY")),
        "tiles": str(config),
        "uses_tma": config.uses_tma,
        "is_specialized": config.is_specialized,
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "num_spills": num_spills,
        "shared_bytes": compiled.metadata.shared,
        "max_shared_bytes": MAX_SHARED_BYTES[target],
        "num_products": ptx.count("fma.rn.f32" if element == "fp32" else instruction),
        "num_bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "num_register_moves": ptx.count("setmaxnreg"),
    }


def cuobjdump(option: str, path: str) -> str:
    command = [str(TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def constants_of(kernel, config, *, is_full: bool) -> dict[str, object]:
    """All of a kernel's compile-time arguments; `is_full` turns every feature but bias on."""
    values = {
        "HAS_BIAS": False, "HAS_SOFTCAP": is_full, "NEEDS_ENTROPY": is_full,
        "HAS_GRAD_LOGPROB": True, "HAS_GRAD_ENTROPY": is_full, "UPCAST": False,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns,
        "BLOCK_SIZE": config.block_size, "TILES_PER_SPLIT": config.tiles_per_split,
        "GROUP": config.group, "WARP_SPECIALIZE": config.is_specialized,
    }  # fmt: skip
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def main() -> None:
    for target, capability in ((80, (8, 0)), (90, (9, 0)), (100, (10, 0))):
        plain = triton_launch.plain_tiles(capability, is_half=True)
        cases = [
            (triton_kernels.forward_partials, plain, "bf16", False),
            (triton_kernels.forward_partials, plain, "bf16", True),
            (triton_kernels.grad_products, plain, "bf16", False),
            (triton_kernels.grad_products, plain, "bf16", True),
        ]
        for is_full in (False, True):
            version = triton_launch.triton_version()
            cases += [
                (triton_kernels.forward_partials_tma, bulk, "bf16", is_full)
                for bulk in triton_launch.bulk_tiles(capability, version, is_plain=not is_full)
            ]
        if target == 80:
            cases += [
                (triton_kernels.forward_partials, triton_launch.FLOAT32, "fp32", True),
                (triton_kernels.grad_products, triton_launch.FLOAT32, "fp32", True),
            ]
        for kernel, config, element, is_full in cases:
            constants = constants_of(kernel, config, is_full=is_full)
            print(
                json.dumps(compile_kernel(kernel, target, config, constants, element)), flush=True
            )


if __name__ == "__main__":
    main()
