"""Numbers that no option or data sheet has: each says whether it was measured."""

from dataclasses import asdict, dataclass
from pathlib import Path

from lightrft.config.files import FileError, read_object, typed
from lightrft.config.toml import read_toml


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the plan.

    Args:
        value: Number in its unit.
        meaning: Meaning with the unit.
        measured_on: Machine, GPU and versions of the run that it is from; "" is an assumption.
        compare: Numbers that others report of it.
    """

    value: float
    meaning: str
    measured_on: str = ""
    compare: str = ""

    @property
    def source(self) -> str:
        """Origin of the number."""
        kind = f"measured on {self.measured_on}" if self.measured_on else "assumed"
        return f"{kind}; {self.compare}" if self.compare else kind


ASSUMED_FILE = Path(__file__).with_name("constants.toml")
# {name: {"value": ..., "measured_on": ...}}; benchmarks that ran on a GPU write it.
MEASURED_FILE = Path(__file__).with_name("measured_constants.json")


def with_measured(path: Path = MEASURED_FILE) -> dict[str, Constant]:
    """Return the constants, with what a GPU has measured in place of assumptions.

    Args:
        path: File of measured values; without it all are assumed.

    Raises:
        FileError: A file is damaged, or has a constant that the plan lacks.
    """
    assumed = typed(dict[str, Constant], read_toml(ASSUMED_FILE), ASSUMED_FILE)
    measured = typed(
        dict[str, dict[str, object]], read_object(path) if path.is_file() else {}, path
    )
    if unknown := measured.keys() - assumed.keys():
        raise FileError(
            f"{path}: got {', '.join(sorted(unknown))}, expected names of {ASSUMED_FILE.name}: "
            "rename them, or leave them out"
        )
    merged = {name: {**asdict(assumed[name]), **each} for name, each in measured.items()}
    return assumed | typed(dict[str, Constant], merged, path)


CONSTANTS = with_measured()


def constant(name: str) -> float:
    """Return the value of a constant."""
    return CONSTANTS[name].value
