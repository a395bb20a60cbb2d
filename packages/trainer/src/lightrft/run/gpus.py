"""Common GPUs, from their makers' data sheets."""

from dataclasses import dataclass

from lightrft.config import ConfigError
from lightrft.config.options import did_you_mean

GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of device.

    Args:
        device_name: Part of the driver's name for it.
        memory_bytes: Memory of one device.
        tflops: Dense bfloat16 peak, 1e12 operations per second.
        memory_gb_per_second: Bandwidth of its memory.
        link_gb_per_second: Bandwidth to a device of its node, one direction.
        source: Data sheet with these numbers.
    """

    device_name: str
    memory_bytes: float
    tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    source: str


# Data sheets print peaks with 2:4 sparsity, which are halved here (A100's and the RTX 4090's tables
# have dense ones, too), and the sum of both directions of NVLink or PCIe, which is halved as well.
# Their GB are taken as 1e9 bytes: drivers report between 0 and 7 % more.
# The first preset whose `device_name` is part of a device's name counts.
GPUS = {
    "h100-pcie-80g": Gpu(
        "H100 PCIe",
        80 * GB,
        756.0,
        2000.0,
        64.0,
        "H100 data sheet, H100 PCIe: 1,513 TFLOPS sparse, 2 TB/s, PCIe Gen5 128 GB/s",
    ),
    "h100-80g": Gpu(
        "H100",
        80 * GB,
        989.4,
        3350.0,
        450.0,
        "H100 data sheet, H100 SXM: 1,979 TFLOPS sparse, 3.35 TB/s, NVLink 900 GB/s",
    ),
    "h200-141g": Gpu(
        "H200",
        141 * GB,
        989.4,
        4800.0,
        450.0,
        "H200 data sheet, H200 SXM: 1,979 TFLOPS sparse, 4.8 TB/s, NVLink 900 GB/s",
    ),
    "b200-180g": Gpu(
        "B200",
        180 * GB,
        2250.0,
        7700.0,
        900.0,
        "Blackwell data sheet, GPU of HGX B200: 4,500 TFLOPS sparse, 7.7 TB/s, NVLink 1.8 TB/s",
    ),
    "a100-40g": Gpu(
        "A100-SXM4-40GB",
        40 * GB,
        312.0,
        1555.0,
        300.0,
        "A100 data sheet, A100 40GB SXM: 312 TFLOPS dense, 1,555 GB/s, NVLink 600 GB/s",
    ),
    "a100-80g": Gpu(
        "A100",
        80 * GB,
        312.0,
        2039.0,
        300.0,
        "A100 data sheet, A100 80GB SXM: 312 TFLOPS dense, 2,039 GB/s, NVLink 600 GB/s",
    ),
    "l40s-48g": Gpu(
        "L40S",
        48 * GB,
        362.0,
        864.0,
        32.0,
        "L40S data sheet: 362.05 TFLOPS dense, 864 GB/s, PCIe Gen4 64 GB/s",
    ),
    "l4-24g": Gpu(
        "L4",
        24 * GB,
        121.0,
        300.0,
        32.0,
        "L4 data sheet: 242 TFLOPS sparse, 300 GB/s, PCIe Gen4 64 GB/s",
    ),
    "rtx4090-24g": Gpu(
        "RTX 4090",
        24 * GB,
        165.2,
        1008.0,
        32.0,
        "Ada architecture white paper: 165.2 TFLOPS dense, 1,008 GB/s, PCIe Gen4 64 GB/s",
    ),
}


def find_gpu(name: str) -> Gpu:
    """Return a preset by its name.

    Raises:
        ConfigError: There is none of this name; the message lists those there are.
    """
    if name not in GPUS:
        raise ConfigError(
            f"--gpu: no preset {name!r}{did_you_mean(name, GPUS)}; there are {', '.join(GPUS)}"
        )
    return GPUS[name]


def gpu_of(device_name: str) -> Gpu | None:
    """Return the preset of a device, by the driver's name for it."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name in device_name), None)
