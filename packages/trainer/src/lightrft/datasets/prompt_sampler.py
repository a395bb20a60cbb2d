"""The object that decides which rows are drawn, and in which order.

A sampler is a class that the option `prompt_sampler` names:

    class MySampler:
        def __init__(self, rows, *, patience: int = 3): ...   # hyper-parameters by keyword
        state: dict                                           # everything that changes, as JSON
        def draw(self, n): ...                                # places of the next n rows
        def observe(self, results): ...                       # outcomes of a trained step

Every rank draws with an equal sampler and takes its share. Results are observed in the order of
steps, after the step that trains on them. So draws depend on steps alone, never on arrival.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lightrft.config import ConfigError, OrderOptions
from lightrft.config.registry import PROMPT_SAMPLERS, bind

if TYPE_CHECKING:
    from lightrft.datasets.pass_rates import PassRate

# The first draws of a process are made twice by a sampler that does not ship with the package.
NUM_PROVED_DRAWS = 3


class Drawn(NamedTuple):
    """A drawn row.

    Args:
        place: Place in the data, from 0.
        probability: Mean share of this row among all draws, above 0; None is not known.
    """

    place: int
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Outcome of one drawn row of a step.

    Args:
        place: Place in the data of the drawn row.
        rewards: Reward of each sample; () in stages without samples.
        accuracies: Accuracy of each sample: the reward's component of that name, or the reward.
        lengths: Tokens of each sample, or of each row.
    """

    place: int
    rewards: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def has_no_signal(self) -> bool:
        """Return whether all accuracies are equal, up to rounding, so that no sample is better."""
        if not self.accuracies:
            return True
        low, high = min(self.accuracies), max(self.accuracies)
        return high - low <= 1e-13 * (2 * max(abs(low), abs(high)) + 1e-3)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Rows that a sampler draws from.

    Args:
        num_rows: Number of rows.
        seed: Seed of the run.
        num_per_step: Rows of one step, over all ranks.
        has_rewards: Whether results have rewards.
        needs_probabilities: Whether each draw must come with its probability.
        weights: [rows] float64 of `prompt_weight`, with sum 1; None without.
        rates: Pass rate of each row of `prompt_rates`; () without.
        columns: Columns of each row; () in stages whose rows become tokens.
    """

    num_rows: int
    seed: int
    num_per_step: int
    has_rewards: bool = False
    needs_probabilities: bool = False
    weights: NDArray[np.float64] | None = None
    rates: Sequence[PassRate] = field(default=(), repr=False)
    columns: Sequence[Mapping[str, object]] = field(default=(), repr=False)

    def draw_by(self, probabilities: NDArray[np.float64], n: int, number: int) -> list[Drawn]:
        """Draw n rows, row i on average n p_i times and never a whole time off.

        The rows lie in a random order on a circle, row i with the length p_i. n points at equal
        distances, turned by a random angle, name the drawn rows.

        Args:
            probabilities: [rows] with sum 1.
            n: Number of rows.
            number: Number of the draw; equal ones have equal random numbers.

        Source: Madow 1949, doi:10.1214/aoms/1177729988 (systematic sampling).
        """
        generator = self.generator(number)
        order = generator.permutation(len(probabilities))
        stops = np.cumsum(probabilities[order])
        points = (np.arange(n) + generator.random()) / n * stops[-1]
        # A point that is rounded up to the end belongs to the last row that has a length.
        last = np.searchsorted(stops, stops[-1])
        chosen = order[np.minimum(np.searchsorted(stops, points, side="right"), last)]
        return [Drawn(int(place), float(probabilities[place])) for place in chosen]

    def generator(self, *numbers: int) -> np.random.Generator:
        """Return random numbers that depend on the seed of the run and on these numbers."""
        return np.random.default_rng([self.seed, *numbers])


class PromptSampler(Protocol):
    """The order of the rows of a run.

    Attributes:
        state: Values for JSON that decide all later draws; set after a resume.
    """

    state: dict[str, object]

    def draw(self, n: int) -> Sequence[int | Drawn]:
        """Return the places of the next rows."""
        ...

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Learn from the outcomes of a step, in the order of its groups."""
        ...


class SamplerError(ConfigError):
    """A prompt sampler breaks its contract; the message says how."""


def build_sampler(config: OrderOptions, rows: RowChoice) -> PromptSampler:
    """Return a new sampler of the options.

    Raises:
        ConfigError: It cannot be loaded or built, or lacks a method.
    """
    name = config.order
    made = PROMPT_SAMPLERS.load(name)
    if not callable(made):
        raise SamplerError(f"prompt_sampler {name}: expected a class, got {type(made).__name__}")
    build = bind(
        cast("Callable[[RowChoice], PromptSampler]", made),
        config.prompt_sampler_args or {},
        owner=f"prompt_sampler {name}",
    )
    try:
        sampler = build(rows)
    except ConfigError:
        raise
    except Exception as error:
        raise SamplerError(
            f"prompt_sampler {name}: {type(error).__name__}: {error}; it is built of the rows "
            "(RowChoice) alone, with hyper-parameters by keyword"
        ) from error
    lacking = [each for each in ("state", "draw", "observe") if not hasattr(sampler, each)]
    if lacking:
        raise SamplerError(
            f"prompt_sampler {name} has no {' and no '.join(lacking)}: expected state, draw(n) and "
            "observe(results)"
        )
    return sampler


class CheckedSampler:
    """A sampler whose draws and states are checked, with the number of its draws.

    Args:
        config: Options that choose it.
        rows: Rows that it draws from.
    """

    def __init__(self, config: OrderOptions, rows: RowChoice) -> None:
        self._config, self._rows, self.name = config, rows, config.order
        self._sampler = build_sampler(config, rows)
        is_built_in = PROMPT_SAMPLERS.is_built_in(self.name)
        self._num_unproved = 0 if is_built_in else NUM_PROVED_DRAWS

    def draw(self, n: int) -> list[Drawn]:
        """Return the next rows.

        Raises:
            SamplerError: Not n places of rows come back, or its state does not decide them.
        """
        before = self.state if self._num_unproved else ""
        drawn = self._checked(self._sampler, n)
        if self._num_unproved:
            self._num_unproved -= 1
            restored = build_sampler(self._config, self._rows)
            restored.state = json.loads(before)
            if self._checked(restored, n) != drawn:
                raise SamplerError(
                    f"prompt_sampler {self.name} draws other rows once it is restored from its "
                    "state, as a resume does: keep all that changes in state, and take random "
                    "numbers from rows.generator(number of the draw)"
                )
        return drawn

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Pass the results of a step on."""
        self._sampler.observe(results)

    @property
    def counts_passes(self) -> bool:
        """Return whether its state is a position in a pass, and nothing else."""
        return {*self._sampler.state} == {"episode", "consumed"}

    @property
    def state(self) -> str:
        """State as JSON.

        Raises:
            SamplerError: It holds other values than JSON does.
        """
        try:
            return json.dumps(self._sampler.state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SamplerError(
                f"prompt_sampler {self.name}: its state cannot be saved: {error}; keep numbers, "
                "texts, lists and dicts in it"
            ) from error

    @state.setter
    def state(self, text: str) -> None:
        self._sampler.state = json.loads(text)

    def _checked(self, sampler: PromptSampler, n: int) -> list[Drawn]:
        drawn = [
            each if isinstance(each, Drawn) else Drawn(self._place(each))
            for each in sampler.draw(n)
        ]
        odd = [p for _, p in drawn if p is not None and not 0 < p <= 1]
        if odd:
            raise SamplerError(
                f"prompt_sampler {self.name} gave the probability {odd[0]!r} for a draw: expected "
                "a number above 0 and at most 1"
            )
        wrong = [each.place for each in drawn if not 0 <= each.place < self._rows.num_rows]
        if wrong or len(drawn) != n:
            problem = f"drew the place {wrong[0]}" if wrong else f"drew {len(drawn)} rows"
            raise SamplerError(
                f"prompt_sampler {self.name} {problem}: expected {n} places from 0 to "
                f"{self._rows.num_rows - 1}"
            )
        return drawn

    def _place(self, value: object) -> int:
        try:
            return index(cast("int", value))
        except TypeError:
            raise SamplerError(
                f"prompt_sampler {self.name} drew {value!r}: expected the place of a row, a number"
            ) from None
