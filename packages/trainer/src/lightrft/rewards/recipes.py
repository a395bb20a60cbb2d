"""Weights of rewards by row."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.rewards.types import RewardError
from lightrft.strategy.config import ConfigError


@dataclass(frozen=True, slots=True)
class RewardRecipes:
    """Weights of rewards by the value that a row has in one column.

    Args:
        column: Of the data rows.
        weights: Value of the column -> name of a reward -> its weight. A reward that is not named
            is not asked for these rows.
    """

    column: str
    weights: Mapping[str, Mapping[str, float]]

    def weights_of(self, value: object) -> Mapping[str, float]:
        """The weights of a row with this value.

        Raises:
            RewardError: There is no recipe for it.
        """
        if not isinstance(value, str) or value not in self.weights:
            raise RewardError(
                f"no reward recipe for {value!r} in column {self.column!r}: known are "
                f"{', '.join(sorted(self.weights))}; add a table to --reward_recipe"
            )
        return self.weights[value]


def load_recipes(path: str | Path, *, column: str, names: Sequence[str]) -> RewardRecipes:
    """Reads a TOML file with a table for every value of the column.

        [math]
        gsm8k = 1.0
        [chat]
        model = 0.5

    Args:
        path: The file.
        column: Of the data rows.
        names: Rewards of the run.

    Raises:
        ConfigError: The file cannot be read, two rewards have one name, or a table names an
            unknown reward or no number.
    """
    if len(set(names)) < len(names):
        raise ConfigError(f"reward_recipe needs rewards of different names: got {', '.join(names)}")
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"reward_recipe: cannot read {path}: {err}") from err
    recipes: dict[str, dict[str, float]] = {}
    for value, table in tables.items():
        if not isinstance(table, dict) or not table:
            raise ConfigError(f"reward_recipe: {path}: expected a table [{value}] with weights")
        recipes[value] = {}
        for name, weight in table.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if name not in names or not is_number or not math.isfinite(weight):
                raise ConfigError(
                    f"reward_recipe: {path}: got {name} = {weight!r} in [{value}], expected a "
                    f"number for one of {', '.join(sorted(names))}"
                )
            recipes[value][name] = float(weight)
    if not recipes:
        raise ConfigError(f"reward_recipe: {path} has no tables")
    return RewardRecipes(column, recipes)
