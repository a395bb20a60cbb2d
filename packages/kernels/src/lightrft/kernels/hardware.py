"""Capabilities of this build and this machine; only this module probes for them."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from lightrft.kernels.weight_bucket.native import load_extension


@dataclass(frozen=True, slots=True)
class KernelCapabilities:
    """Implementations that can run here.

    Args:
        native_extension: Whether the C++ extension is built and matches these sources.
        cuda_extension: Whether the extension contains CUDA code.
        cuda: Whether torch sees a CUDA device.
        triton: Whether Triton is importable.
        cpu_capability: Vector instruction set that torch uses on the CPU, e.g. "AVX512".
    """

    native_extension: bool
    cuda_extension: bool
    cuda: bool
    triton: bool
    cpu_capability: str


@cache
def capabilities() -> KernelCapabilities:
    """Probe once per process; create no CUDA context unless a device is present."""
    extension = load_extension()
    return KernelCapabilities(
        native_extension=extension is not None,
        cuda_extension=extension is not None and extension.has_cuda,
        cuda=torch.cuda.is_available(),
        triton=importlib.util.find_spec("triton") is not None,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )
