"""Common GPUs, from their makers' data sheets."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from lightrft.config import ConfigError
from lightrft.config.options import did_you_mean


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of device.

    Args:
        device_name: Part of the driver's name for it.
        memory_bytes: Memory of one device.
        tflops: Dense bfloat16 peak, 1e12 operations per second.
        source: Data sheet with these numbers.
    """

    device_name: str
    memory_bytes: float
    tflops: float
    source: str


# The first preset whose `device_name` is part of a device's name counts.
_ROWS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
GPUS = {name: Gpu(**row) for name, row in _ROWS.items()}


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
