"""Optimizer steps on rows that are known before the run, for any objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch
from torch import Tensor

from lightrft.config import RowRunOptions, TrainConfig
from lightrft.datasets.prompt_sampler import (
    GroupResult,
    RowChoice,
    SampledRows,
    SampledStream,
    probabilities_of,
)
from lightrft.datasets.row_data import Item, RowData, RowPixels
from lightrft.engines.media.text_encoder import TEXT_ENCODER
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.models import configure_models
from lightrft.stages.rows.row_objective import Known, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import RowPasses, planned_part, shared_part, token_bound
from lightrft.stages.stage import (
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)

if TYPE_CHECKING:
    from lightrft.stages.observer import ObservedStep, Observer
    from lightrft.strategy.strategy_base import StrategyBase


class RowStage(Stage[RowBatch[Item, Known]], Generic[Item, Known]):
    """Stage of one optimizer step on `train_batch_size` items, reshuffled in each pass.

    The loss is the sum of the shares of all micro-batches of all ranks.

    Args:
        config: Options of the run, with the machine's choices made.
        strategy: Trains over ranks.
        models: One model.
        data: Items to train on.
        held_out: Items to evaluate on.
        objective: Objective to minimise.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        data: RowData[Item],
        held_out: Sequence[Item],
        objective: RowObjective[Item, Known],
    ) -> None:
        self.strategy, self.models, self.objective = strategy, models, objective
        self.data, self.held_out = data, tuple(held_out)
        self.item_name, self.kept_dropout = objective.item_name, objective.kept_dropout
        self.syncs_engine = objective.syncs_engine
        model = models.main.model
        rows = (row for item in (*data.rows, *self.held_out) for row in item.rows)
        pixels = RowPixels.of(data.encoder, rows)
        self.config = configure_models(
            config,
            strategy.context,
            [model, *objective.frozen],
            kept=objective.kept_dropout,
            encoder=data.encoder if pixels.present else TEXT_ENCODER,
        )
        for each in objective.frozen:
            each.eval()
        self.passes = RowPasses(self.config, strategy.context, model, pixels)
        places, choice = range(len(data)), row_choice(data, config)
        self.loader = SampledRows(places, config, choice, strategy.context)
        most = max(len(item.rows) for item in data.rows)
        bound = token_bound(self.config, rows_per_item=most)
        self._cut = self.config.replaced({"micro_batch_tokens": bound})
        self._trained: Mapping[str, float] | None = None

    def planned_steps(self) -> int:
        """Return the number of steps of the whole run."""
        return num_updates(len(self.data), self.config, self.strategy.world_size)

    def draw(self, step: Step) -> RowBatch[Item, Known]:
        """Return the batch of one step; all ranks know all items, to share out long ones evenly."""
        places = drawn_places(step)
        items = tuple(self.data.rows[place] for place in places)
        if self.syncs_engine:
            items = self.objective.drawn(items, step, self.passes, self.strategy.session)
        name = self.objective.measured_as
        with nullcontext() if name is None else step.timer.stage(name):
            batch = self.batch_of(items, step.number)
        return replace(batch, places=tuple(places))

    def batch_of(self, items: tuple[Item, ...], number: int) -> RowBatch[Item, Known]:
        """Distribute the items of one step over the ranks and measure them; collective."""
        part = planned_part(items, self._cut, self.passes, step=number)
        return RowBatch(part, self.objective.measure(part, number))

    def update(self, batch: RowBatch[Item, Known], step: Step) -> Work:
        """Take one optimizer step."""
        objective, part, model = self.objective, batch.part, self.models.main
        observer = None
        if step.is_due(self.config.audit_every):
            from lightrft.stages.observer import open_observer

            observer = open_observer(self._observed(part.items, step))
            observer.begin_update(model.name, objective.normalizer(part, batch.known))

        def shares(where: slice) -> Callable[[], Tensor]:
            return lambda: self._share(batch, where, step.metrics, observer)

        result = optimizer_step(
            model,
            [shares(where) for where in part.slices],
            training=self.strategy.training,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        if observer is not None:
            observer.end_update(result)
            observer.finish()
        record_total("loss", self.strategy.context, step.metrics)
        if step.number == step.num_planned:
            objective.conclude(self.data, self.passes)
        lengths = np.array(batch.lengths, dtype=np.int64)
        scored = np.array(batch.num_trained if objective.scores_tokens else 0 * lengths)
        return Work((model.name,), lengths, scored.astype(np.int64))

    def _observed(self, items: Sequence[Item], step: Step) -> ObservedStep:
        """Describe a step by its rows, however they were chosen."""
        from lightrft.stages.observer import ObservedRows, ObservedStep

        data = self.data.rows
        known = {id(item.rows[0]): place for place, item in enumerate(data)}
        places = [known.get(id(item.rows[0]), -1) for item in items]
        rows = ObservedRows(
            [item.rows for item in items], places, len(data), self.objective.facts(items)
        )
        backend, engine = self.strategy.backend, self.strategy.inference_engine
        of_run = (step.num_planned, self.config, backend, engine, self.models)
        return ObservedStep(self.objective.name, step.number, *of_run, rows)

    def _share(
        self,
        batch: RowBatch[Item, Known],
        where: slice,
        metrics: StepMetrics,
        observer: Observer | None,
    ) -> Tensor:
        """Compute the share of a micro-batch in the loss of the step."""
        micro = batch.part.micro_batch(where)
        share = self.objective.share(micro, batch.known, metrics)
        if observer is not None:
            rows = share.rows
            values = {
                "token_ids": rows.token_ids,
                "response_mask": rows.is_trained,
                "new": share.values,
                "old_logprobs": share.values,
                "ref_logprobs": share.reference,
            }
            observer.micro_batch(rows.ids, rows.attention_mask, values, share.terms)
        metrics.add_mean("loss", share.terms["policy"], 0.0)
        return share.loss

    def results(self, batch: RowBatch[Item, Known]) -> list[GroupResult]:
        """Return place and lengths of the step's items, for the prompt sampler."""
        pairs = zip(batch.places, batch.part.items, strict=False)
        return [
            GroupResult(place, lengths=tuple(len(row.token_ids) for row in item.rows))
            for place, item in pairs
        ]

    def finish(self, batch: RowBatch[Item, Known], metrics: dict[str, float]) -> dict[str, float]:
        """Complete the metrics of a step."""
        self._trained = self.objective.finish(batch, metrics)
        return dict(self._trained)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Compute metrics `eval/...` of the held-out items, and print doubts."""
        if not self.held_out:
            return {}
        size = len(self.held_out)
        part = shared_part(self.held_out, self.passes)
        metrics = self.objective.evaluate(part)
        for line in self.objective.doubts(metrics, self._trained, size):
            self.strategy.print(f"warning: {line}")
        return {f"eval/{n}": v for n, v in metrics.items()} | {"eval/num_rows": float(size)}

    def resumed(self) -> None:
        """Complete the model again: the checkpoint may be the one of the last step."""
        self._trained = {}
        self.objective.conclude(self.data, self.passes)

    def prove_saved(self, folder: Path) -> None:
        """Prove that the written model is the trained one."""
        self.objective.prove_saved(folder, self.data, self.passes)

    def close(self) -> None:
        """Close the connections of the objective."""
        self.objective.close()


def row_choice(data: RowData[Item], config: RowRunOptions) -> RowChoice:
    """Return what a prompt sampler knows of the items."""
    weights = probabilities_of(data.weights, config)
    return RowChoice(len(data), config.seed, config.train_batch_size, weights=weights)


def drawn_places(step: Step) -> list[int]:
    """Return the places of the items that all ranks draw for a step, in order; collective.

    Raises:
        RuntimeError: The step has no rows to draw from.
    """
    if not isinstance(step.data, SampledStream):
        raise RuntimeError("steps on given rows draw them by a sampler")
    return sorted(each.place for each in step.data.next_draw())


def num_updates(num_items: int, config: RowRunOptions, world_size: int = 1) -> int:
    """Return the number of optimizer steps: the whole batches of each of `max_epochs` passes."""
    shared = num_items // world_size * world_size
    total = shared // config.train_batch_size * config.max_epochs
    return total if config.max_steps is None else min(total, config.max_steps)
