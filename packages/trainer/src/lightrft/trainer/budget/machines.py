"""What common GPUs are, from their makers' data sheets."""

from dataclasses import dataclass

from lightrft.config import ConfigError
from lightrft.config.options import did_you_mean

GB = 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of device.

    Args:
        device_name: Part of what the driver calls it.
        memory_bytes: Of one device.
        tflops: Dense bfloat16 peak, 1e12 operations per second.
        memory_gb_per_second: Of its own memory.
        link_gb_per_second: To a device of its node, one direction.
    """

    device_name: str
    memory_bytes: float
    tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float


# The first whose `device_name` is part of a device's name counts. Dense peaks; NVLink's published
# sum of both directions is halved; devices without NVLink are given their PCIe 4.0 x16.
GPUS = {
    "h100-pcie-80g": Gpu("H100 PCIe", 80 * GB, 756.0, 2000.0, 32.0),
    "h100-80g": Gpu("H100", 80 * GB, 989.4, 3350.0, 450.0),
    "h200-141g": Gpu("H200", 141 * GB, 989.4, 4800.0, 450.0),
    "b200-180g": Gpu("B200", 180 * GB, 2250.0, 8000.0, 900.0),
    "a100-40g": Gpu("A100-SXM4-40GB", 40 * GB, 312.0, 1555.0, 300.0),
    "a100-80g": Gpu("A100", 80 * GB, 312.0, 2039.0, 300.0),
    "l40s-48g": Gpu("L40S", 48 * GB, 362.0, 864.0, 32.0),
    "l4-24g": Gpu("L4", 24 * GB, 121.0, 300.0, 32.0),
    "rtx4090-24g": Gpu("RTX 4090", 24 * GB, 165.2, 1008.0, 32.0),
}


def find_gpu(name: str) -> Gpu:
    """A preset by its name.

    Raises:
        ConfigError: There is none of this name; the message lists those there are.
    """
    if name not in GPUS:
        raise ConfigError(
            f"--gpu: no preset {name!r}{did_you_mean(name, GPUS)}; there are {', '.join(GPUS)}"
        )
    return GPUS[name]


def gpu_of(device_name: str) -> Gpu | None:
    """The preset of a device, by what the driver calls it."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name in device_name), None)
