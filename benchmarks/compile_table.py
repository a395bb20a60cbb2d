"""Compiles the kernels offline for four GPUs and says what the machine code is like.

    python benchmarks/compile_table.py [--fast] [--only KERNEL] [--json FILE] [--markdown FILE]

Needs no GPU: ptxas and cuobjdump come with Triton. `--fast` takes the cases that the default tests
compare with the committed table (benchmarks/results/compiled_kernels.json). A case is one kernel
with the tiles and the arguments that `linear_logprob` launches it with; `cases` is the only list.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightrft.kernels.logprob import triton_kernels, triton_launch
from lightrft.kernels.logprob.triton_launch import TileConfig

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = (80, 90, 100, 120)
# Shared memory one program may have; sm_120 has that of a consumer card.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
PRODUCT = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
FLOATS = (
    "maximum", "log_sum", "logprobs", "entropy", "grad_logprobs", "grad_entropy", "partials",
    "maximum_out", "exp_sum_out", "weighted_sum_out", "centre",
)  # fmt: skip
POINTERS = ("hidden", "weight", "bias", "out", "products")
# Of what the launcher sees aligned to 16; counts of rows are not, unless they are padded.
ALIGNED = (
    *POINTERS, *FLOATS, "targets", "size", "stride_h", "stride_w", "stride_out", "stride",
    "num_columns", "num_rows", "num_padded",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel as it is launched.

    Args:
        kernel: Its name in triton_kernels.
        target: Compute capability, times ten.
        features: What it computes besides, e.g. "bias entropy".
        element: Dtype of its operands.
        tiles: The tile shape, warps and stages.
        constants: Other compile-time arguments.
        unaligned: Arguments that are not multiples of 16 in this case.
        is_fast: Compared by the default tests.
    """

    kernel: str
    target: int
    features: str
    element: str
    tiles: TileConfig
    constants: tuple[tuple[str, object], ...]
    unaligned: tuple[str, ...] = ()
    is_fast: bool = False

    @property
    def name(self) -> str:
        """What a row of the table is called."""
        parts = [self.kernel, f"sm_{self.target}", self.element, self.features or "plain"]
        return " ".join([*parts, *(f"{name}%16" for name in self.unaligned)])


def cases() -> list[Case]:
    """Every kernel of `linear_logprob` in every configuration that a default call can reach."""
    return [case for target in TARGETS for case in _cases_of(target)]


def _cases_of(target: int) -> list[Case]:
    capability = divmod(target, 10)
    found = []

    def add(kernel, features, tiles, *, element="bf16", unaligned=(), is_fast=False):
        found.append(
            Case(
                kernel, target, features, element, tiles,
                tuple(constants_of(kernel, features, tiles).items()), unaligned, is_fast,
            )
        )  # fmt: skip

    for features in ("", "entropy", "bias", "bias entropy softcap"):
        for bulk in triton_launch.bulk_tiles(
            capability, triton_launch.triton_version(), has_bias="bias" in features,
            needs_entropy="entropy" in features,
        ):  # fmt: skip
            add("forward_partials_tma", features, bulk, is_fast=target == 90)
    return found
