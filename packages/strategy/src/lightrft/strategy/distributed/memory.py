"""Memory of this process and of its device."""

from dataclasses import dataclass

import psutil
import torch

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory in use, in bytes.

    Args:
        device: "cuda:0", "cpu", ...
        driver_used_bytes: Used on the device by everybody; on a CPU the machine's used memory.
        allocated_bytes: Allocated by torch on the device; on a CPU this process' resident memory.
        total_bytes: Of the device or machine.
    """

    device: str
    driver_used_bytes: int
    allocated_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        return (
            f"DRIVER_USED={self.driver_used_bytes / GIGABYTE:.2f} GB, "
            f"ALLOCATED={self.allocated_bytes / GIGABYTE:.2f} GB"
        )


def measure_memory() -> MemoryReport:
    """Measures the current CUDA device, or the process where there is none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = f"cuda:{torch.cuda.current_device()}"
        return MemoryReport(device, total - free, torch.cuda.memory_allocated(), total)
    machine = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return MemoryReport("cpu", machine.total - machine.available, resident, machine.total)
