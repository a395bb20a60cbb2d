"""Compiles a kernel of `linear_logprob` for a GPU that is not here, and reads its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
_OF_ELEMENTS = {"hidden", "weight", "bias", "products", "out"}
# Counts that the launcher hides from the specialisation (see COUNTS in triton_kernels) never are.
_ALIGNED = _FLOATS | _OF_ELEMENTS | {
    "targets", "size", "stride_h", "stride_w", "stride_out", "stride", "num_columns", "num_rows",
}  # fmt: skip


def _argument_type(name: str, types: dict[str, str]) -> str:
    if name in types:
        return types[name]
    if name in _FLOATS:
        return "*fp32"
    if name in ("scale", "softcap"):
        return "fp32"
    return "*i64" if name == "targets" else "i32"


def compile_kernel(kernel, target, tiles, constants, types, unaligned=()):
    """A row of the table: what ptxas made of one kernel.

    Args:
        kernel: A jitted function.
        target: Compute capability times ten.
        tiles: (warps, stages).
        constants: Compile-time arguments.
        types: Of the pointers to elements, and of descriptors.
        unaligned: Arguments that are no multiples of 16.
    """
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else _argument_type(name, types) for name in names
    }
    hidden_from_it = {kernel.params[i].name for i in range(len(names)) if kernel.params[i].do_not_specialize}
    aligned = [
        index
        for index, name in enumerate(names)
        if name in _ALIGNED - hidden_from_it - set(unaligned) and name not in constants
        and "tensordesc" not in signature[name]
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    warps, stages = tiles
    compiled = triton.compile(
        source, target=GPUTarget("cuda", target, 32),
        options={"num_warps": warps, "num_stages": stages},
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    return {**read_code(code), **read_usage(usage), "shared_bytes": compiled.metadata.shared}


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
