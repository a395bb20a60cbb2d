"""Objectives of stages over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor, nn

from lightrft.datasets.row_data import Item, RowData
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.rows.row_passes import MicroBatch, PaddedRows, RowPart, RowPasses
from lightrft.stages.stage import KeptDropout, Step, record_total

if TYPE_CHECKING:
    from lightrft.stages.observer import Facts
    from lightrft.strategy.engine.session import EngineSession

Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class LossShare:
    """Share of a micro-batch in the loss of a step.

    Args:
        loss: [] value that is differentiated.
        terms: Terms of the loss by name, []; "policy" is the displayed loss.
        rows: Rows of the micro-batch; tokens with a value are marked as trained.
        values: [batch, seq] logprobs or scores, 0 elsewhere; None is absent.
        reference: [batch] sums of each row's logprobs under a reference; None without one.
    """

    loss: Tensor
    terms: Mapping[str, Tensor]
    rows: PaddedRows
    values: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowBatch(Generic[Item, Known]):
    """Items of one optimizer step.

    Args:
        part: Items, distributed over the ranks.
        known: Values of the objective for all items before the update.
        places: Place in the data of each item; () is not known.
    """

    part: RowPart[Item]
    known: Known
    places: tuple[int, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row of all ranks."""
        return [len(row.token_ids) for item in self.part.items for row in item.rows]

    @property
    def num_trained(self) -> list[int]:
        """Trained tokens of each row of all ranks."""
        return [row.num_trained for item in self.part.items for row in item.rows]


class RowObjective(Protocol, Generic[Item, Known]):
    """Loss over items, with its metrics and proofs; subclasses define what differs.

    Args:
        name: Name of the stage, for observers.
        item_name: Plural word for its items.
        kept_dropout: Dropout that acts while the model is updated.
        measured_as: Name of the time of `measure` in the timeline; None is not shown.
        scores_tokens: Whether the model computes logprobs of trained tokens, which count as FLOPs.
        frozen: Models that score beside the trained one.
        syncs_engine: Whether a rollout engine follows the model.
    """

    name: ClassVar[str]
    item_name: ClassVar[str] = "rows"
    kept_dropout: ClassVar[KeptDropout] = "adapters"
    measured_as: ClassVar[str | None] = None
    scores_tokens: ClassVar[bool] = True
    syncs_engine: bool = False

    @property
    def frozen(self) -> Sequence[nn.Module]:
        """Models that score beside the trained one."""
        return ()

    def drawn(
        self, items: tuple[Item, ...], step: Step, passes: RowPasses, session: EngineSession
    ) -> tuple[Item, ...]:
        """Return the items of a step, completed by the engine's samples; collective."""
        return items

    def measure(self, part: RowPart[Item], number: int = 0) -> Known:
        """Compute what the shares need to know of all items; collective, in evaluation mode.

        Args:
            part: Items of a step or an evaluation.
            number: Number of the step; 0 is an evaluation.
        """
        ...

    def normalizer(self, part: RowPart[Item], known: Known) -> Tensor:
        """Return the denominator Z of the loss, []."""
        ...

    def share(self, micro: MicroBatch[Item], known: Known, metrics: StepMetrics) -> LossShare:
        """Compute the share of a micro-batch in the loss; the shares of all ranks add up to it.

        Args:
            micro: Items of a forward pass.
            known: See `measure`.
            metrics: Receives metrics beside the loss.
        """
        ...

    def facts(self, items: Sequence[Item]) -> Facts:
        """Return facts of the data about the rows of some items, for observers."""
        return {}

    def finish(self, batch: RowBatch[Item, Known], metrics: dict[str, float]) -> dict[str, float]:
        """Complete the metrics of a step."""
        return metrics

    def evaluate(self, part: RowPart[Item]) -> dict[str, float]:
        """Compute metrics of held-out items without gradient; collective."""
        return self.mean_shares(part, self.measure(part))

    def mean_shares(self, part: RowPart[Item], known: Known) -> dict[str, float]:
        """Compute the loss of some items and the metrics of their shares; collective."""
        metrics, spare = StepMetrics(), StepMetrics()
        for where in part.slices:
            # Repeated items are scored only because other ranks need as many passes.
            into = metrics if where.start < part.num_counted else spare
            share = self.share(part.micro_batch(where), known, into)
            into.add_mean("loss", share.terms["policy"], 0.0)
        if part.num_counted == 0:
            spare.forget()
            metrics = spare
        record_total("loss", part.passes.context, metrics)
        return metrics.reduce(part.passes.context)

    def doubts(
        self, held_out: Mapping[str, float], trained: Mapping[str, float] | None, num_items: int
    ) -> list[str]:
        """Return one sentence for each suspicious result of an evaluation.

        Args:
            held_out: Metrics of the evaluation.
            trained: Metrics of the last step; {} if a resumed run has none yet, None before it.
            num_items: Number of held-out items.
        """
        return []

    def conclude(self, data: RowData[Item], passes: RowPasses) -> None:
        """Complete the model after the last step and after a resume; collective."""
        return

    def prove_saved(self, folder: Path, data: RowData[Item], passes: RowPasses) -> None:
        """Prove that the written model is the trained one, where possible."""
        return

    def close(self) -> None:
        """Close connections."""
        return
