"""Rows of a run with the sampler that decides which of them each step draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrft.config import OrderOptions, SourceOptions
from lightrft.config.registry import PROMPT_SAMPLERS
from lightrft.datasets.prompt_sampler import (
    CheckedSampler,
    Drawn,
    GroupResult,
    RowChoice,
    SamplerError,
)
from lightrft.datasets.types import DataError, Prompt

if TYPE_CHECKING:
    from lightrft.datasets.files import Row
    from lightrft.strategy.distributed.context import DistributedContext

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
        if not PROMPT_SAMPLERS.is_built_in(self._sampler.name):
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
