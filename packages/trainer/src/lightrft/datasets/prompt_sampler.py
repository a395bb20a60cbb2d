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
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from lightrft.config import ConfigError, OrderOptions, SourceOptions
from lightrft.config.registry import PROMPT_SAMPLERS, bind
from lightrft.datasets.types import DataError, Prompt

if TYPE_CHECKING:
    from lightrft.datasets.files import Row
    from lightrft.datasets.pass_rates import PassRate
    from lightrft.strategy.distributed.context import DistributedContext


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
        self.is_built_in = PROMPT_SAMPLERS.is_built_in(self.name)
        self._num_unproved = 0 if self.is_built_in else NUM_PROVED_DRAWS

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


class InOrder:
    """The order of the files, pass after pass.

    Rows that do not fill a draw at the end of a pass are left out of it.

    Args:
        rows: Rows to draw from.
    """

    def __init__(self, rows: RowChoice) -> None:
        self._rows = rows
        self._order: tuple[int, list[int]] | None = None
        self.state: dict[str, object] = {"episode": 0, "consumed": 0}

    def draw(self, n: int) -> list[Drawn]:
        """Return the next places of the pass, or the first of the next one."""
        episode, consumed = int(str(self.state["episode"])), int(str(self.state["consumed"]))
        if consumed + n > self._rows.num_rows:
            episode, consumed = episode + 1, 0
        if self._order is None or self._order[0] != episode:
            self._order = episode, self.order_of(episode)
        self.state = {"episode": episode, "consumed": consumed + n}
        share = 1 / self._rows.num_rows
        return [Drawn(place, share) for place in self._order[1][consumed : consumed + n]]

    def order_of(self, episode: int) -> list[int]:
        """Return the order of a pass."""
        return list(range(self._rows.num_rows))

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Do nothing: results do not change the order."""


class Shuffle(InOrder):
    """A new order in each pass, drawn from seed + pass as torch's DistributedSampler does."""

    def order_of(self, episode: int) -> list[int]:
        """Return the order of a pass."""
        generator = torch.Generator().manual_seed(self._rows.seed + episode)
        order: list[int] = torch.randperm(self._rows.num_rows, generator=generator).tolist()
        return order


Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SampledRows(Generic[Item_co]):
    """Items of a run and their sampler, for `BatchStream`'s place in the loop.

    Args:
        items: Items in the order of the data.
        config: Options that choose the sampler.
        choice: What the sampler knows of the items.
        context: Ranks that share each step.
    """

    items: Sequence[Item_co]
    config: OrderOptions
    choice: RowChoice
    context: DistributedContext

    def __len__(self) -> int:
        return len(self.items) // self.choice.num_per_step

    def stream(self, episode: int, num_consumed: int, sampler_state: str) -> SampledStream[Item_co]:
        """Return the batches of this rank from a position on; see `SampledStream`."""
        return SampledStream(self, episode, num_consumed, sampler_state)


class SampledStream(Generic[Item_co]):
    """Batches of this rank, as a sampler draws them.

    A pass has as many steps as its rows fill, whatever the sampler draws.

    Args:
        rows: Rows with the options of their sampler.
        episode, num_consumed: Position, as in `BatchStream`.
        sampler_state: State of the sampler there; "" in checkpoints of older versions.
    """

    def __init__(
        self, rows: SampledRows[Item_co], episode: int, num_consumed: int, sampler_state: str
    ) -> None:
        self._rows, self._sampler = rows, CheckedSampler(rows.config, rows.choice)
        self.episode, self.num_consumed = episode, num_consumed
        self._places = {
            item.id: place for place, item in enumerate(rows.items) if isinstance(item, Prompt)
        }
        *source, state = json.loads(sampler_state) if sampler_state else [""]
        if source == self._source:
            self._sampler.state = state
        elif self._sampler.counts_passes:
            # An older version, or another sampler or other data before: the position decides.
            self._sampler.state = json.dumps({"episode": episode, "consumed": num_consumed})
        elif sampler_state:
            rows.context.print(
                f"prompt_sampler {self._name} begins anew: the checkpoint has a state of {source}, "
                f"and this run {self._source}"
            )

    @property
    def _name(self) -> str:
        """Name of the sampler, without the place of its file."""
        return self._sampler.name.rpartition(":")[2]

    @property
    def _source(self) -> list[object]:
        """Sampler and number of rows; a state has places, so it goes on only among as many."""
        return [self._name, self._rows.choice.num_rows]

    @property
    def sampler_state(self) -> str:
        """Source and state of the sampler as JSON, for a checkpoint."""
        return json.dumps([*self._source, self._sampler.state])

    def next_draw(self) -> list[Drawn]:
        """Return the rows of the next step, over all ranks; collective.

        Raises:
            ValueError: There are too few rows for one step.
            SamplerError: The sampler breaks its contract, or ranks draw different rows.
        """
        size, num_rows = self._rows.choice.num_per_step, self._rows.choice.num_rows
        if size > num_rows:
            raise ValueError(
                f"{num_rows} rows do not fill a step of {size}: give more rows, or lower the batch "
                "size"
            )
        drawn = self._sampler.draw(size)
        if not self._sampler.is_built_in:
            _require_equal(drawn, self._name, self._rows.context)
        if self.num_consumed + size > num_rows:
            self.episode, self.num_consumed = self.episode + 1, 0
        self.num_consumed += size
        return drawn

    def next_batch(self) -> Sequence[Item_co]:
        """Return this rank's items of the next step; collective."""
        context = self._rows.context
        share = self.next_draw()[context.rank :: context.world_size]
        return [self.marked(self._rows.items[each.place], each) for each in share]

    def marked(self, item: Item, drawn: Drawn) -> Item:
        """Return a prompt with the probability of its draw; other items as they are.

        Raises:
            SamplerError: Importance weights need a probability that the sampler does not give.
        """
        if not isinstance(item, Prompt):
            return item
        probability, weight = drawn.probability, 1.0
        if probability is not None:
            weight = 1 / (self._rows.choice.num_rows * probability)
        elif self._rows.choice.needs_probabilities:
            raise SamplerError(
                f"prompt_sampler {self._name} does not say how likely its draws are, and "
                "prompt_importance weighs by that: return Drawn(place, probability) from draw"
            )
        return replace(item, draw_probability=probability, draw_weight=weight)

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Pass the results of a completed step to the sampler.

        Args:
            results: Results on all ranks, equal on each; the places of prompts are their ids.
        """
        if self._places:
            known = [each for each in results if each.place in self._places]
            results = [replace(each, place=self._places[each.place]) for each in known]
        self._sampler.observe(results)


def _require_equal(drawn: Sequence[Drawn], name: str, context: DistributedContext) -> None:
    """Raise a SamplerError if rows or their probabilities differ between ranks; collective."""
    ranks = context.gather_objects(list(drawn))
    odd = next((rank for rank, rows in enumerate(ranks) if rows != ranks[0]), None)
    if odd is not None:
        raise SamplerError(
            f"prompt_sampler {name} draws other rows on rank {odd} than on rank 0: take random "
            "numbers from rows.generator(number of the draw), and nothing from the process"
        )


def weight_of(row: Row, config: OrderOptions) -> float:
    """Return the number in the column `prompt_weight` of a row; 1 without that option.

    Raises:
        DataError: It is missing, or not a finite number of at least 0.
    """
    name, columns, location = config.prompt_weight, row.columns, row.location
    if name is None:
        return 1.0
    if name not in columns:
        raise DataError(
            f"{location}: no column {name!r} for the weight, found "
            f"{', '.join(map(repr, columns))}; set --prompt_weight to one of them"
        )
    value = columns[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(str(value)) < math.inf:
        raise DataError(
            f"{location}: column {name!r} must hold a weight of at least 0: got {value!r}"
        )
    return float(str(value))


def probabilities_of(weights: Sequence[float], config: SourceOptions) -> NDArray[np.float64] | None:
    """Return weights divided by their sum; None without `prompt_weight`.

    Raises:
        DataError: All are 0.
    """
    if config.prompt_weight is None:
        return None
    values = np.array(weights, np.float64)
    if not values.sum() > 0:
        raise DataError(
            f"{config.prompt_data}: the column {config.prompt_weight!r} of prompt_weight is 0 in "
            "all rows, so none could be drawn: give some of them a positive weight"
        )
    shares: NDArray[np.float64] = values / values.sum()
    return shares
