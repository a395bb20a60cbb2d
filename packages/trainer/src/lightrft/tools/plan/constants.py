"""Numbers that no option or data sheet has: each says whether it was measured."""

from dataclasses import dataclass
from pathlib import Path

from lightrft.config.files import typed
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


_FILE = Path(__file__).with_name("constants.toml")
CONSTANTS = typed(dict[str, Constant], read_toml(_FILE), _FILE)


def constant(name: str) -> float:
    """Return the value of a constant."""
    return CONSTANTS[name].value
