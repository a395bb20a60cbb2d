"""Numbers that no option and no data sheet has: each says whether it was measured."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lightrft.config.files import read_object


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the model of time.

    Args:
        value: In its unit.
        meaning: With the unit.
        measured_on: Machine, GPU and versions of the run that it is from; "" is an assumption.
        compare: What others report of it.
    """

    value: float
    meaning: str
    measured_on: str = ""
    compare: str = ""

    @property
    def source(self) -> str:
        """The origin of the number."""
        kind = f"measured on {self.measured_on}" if self.measured_on else "assumed"
        return f"{kind}; {self.compare}" if self.compare else kind


# Assumptions; measured ones stand in `MEASURED_FILE`.
_ASSUMED = {
    "reserve_share": Constant(0.05, "share of a device that fragments of memory take"),
    "context_gb": Constant(
        1.5, "GB of a rank's CUDA context with the libraries' kernels and NCCL's channels"
    ),
    "graph_gb_per_layer": Constant(
        0.025,
        "GB of an engine's CUDA graphs for one layer",
        compare="vLLM logs 0.5 to 0.7 GB of 28 to 36 layers",
    ),
    "useful_rows": Constant(32, "responses at a time below which decoding reads weights for few"),
    "train_efficiency": Constant(
        0.40,
        "share of the peak in forward and backward passes",
        compare="0.38 to 0.43 for Llama 3 405B on H100 (arXiv:2407.21783, table 4)",
    ),
    "score_efficiency": Constant(0.50, "share of the peak in forward passes"),
    "decode_bandwidth_share": Constant(0.60, "share of the memory's bandwidth while decoding"),
    "decode_step_seconds": Constant(0.004, "s a decoding step takes beside reading memory"),
    "host_gb_per_second": Constant(
        25.0, "GB/s of a GPU to its host", compare="64 GB/s are on the data sheet of PCIe Gen5 x16"
    ),
    "host_adam_gb_per_second": Constant(
        20.0, "GB/s of memory that a rank's share of the host reads and writes in Adam"
    ),
    "link_share": Constant(
        0.70,
        "share of a link's bandwidth in collectives",
        compare="about 200 of 300 GB/s on 8 A100 with NVLink (NVIDIA/nccl-tests issue 149)",
    ),
    "node_gb_per_second": Constant(
        50.0,
        "GB/s of a GPU to other nodes",
        compare="400 Gb/s is a ConnectX-7 for each GPU, as in DGX H100; DGX A100 has half",
    ),
    "overlap": Constant(0.8, "share of FSDP2's transfers hidden behind computation"),
}


# By name {"value": ..., "measured_on": ...}; benchmarks that ran on a GPU write it.
MEASURED_FILE = Path(__file__).with_name("measured_constants.json")


def with_measured(path: Path = MEASURED_FILE) -> dict[str, Constant]:
    """The constants, with what a GPU has measured in place of assumptions.

    Args:
        path: File of measured values; without it all are assumed.
    """
    found = cast("dict[str, dict[str, Any]]", read_object(path) if path.is_file() else {})
    return _ASSUMED | {name: replace(_ASSUMED[name], **each) for name, each in found.items()}


CONSTANTS = with_measured()


def measured_count() -> str:
    """How many of the constants were measured, as text."""
    number = sum(bool(each.measured_on) for each in CONSTANTS.values())
    return f"{number} of {len(CONSTANTS)} constants are measured"


def constant(name: str) -> float:
    """The value of a constant."""
    return CONSTANTS[name].value
