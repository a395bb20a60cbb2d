"""Optimizer steps on preferences: the mean of a function of sums over the tokens of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightrft.algorithms.preference_losses import AnswerSums, PreferenceSums
from lightrft.config import TrainConfig
from lightrft.datasets.preference_rows import Preference, PreferenceRows
from lightrft.datasets.row_media import RowPixels, ShownMedia
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.experience.minibatches import micro_slices, plan_minibatches
from lightrft.models.loading import ModelLoadError
from lightrft.models.lora import LoraActor
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.models import configure_models
from lightrft.stages.preference.preference_objective import (
    PreferenceObjective,
    StepCounts,
    build_objective,
)
from lightrft.stages.preference.stored_reference import StoredReference, Sums
from lightrft.stages.rows.padded_rows import pad
from lightrft.stages.rows.row_observer import RowObserver, open_row_observer
from lightrft.stages.rows.row_stage import (
    bounded_by_tokens,
    drawn_places,
    planned_updates,
    score_padded,
    score_rows,
)
from lightrft.stages.stage import (
    Stage,
    Step,
    TrainedModels,
    Work,
    optimizer_step,
    record_total,
)
from lightrft.strategy.distributed.deadlines import phase

if TYPE_CHECKING:
    from lightrft.strategy.strategy_base import StrategyBase

# Nats per token between two forward passes of equal weights, by rounding: in float32, in bfloat16.
ROUNDING, BF16_ROUNDING = 1e-5, 1e-2
# What observers are told of each row.
GOOD = "is_good"


@dataclass(frozen=True, slots=True)
class PreferencePart:
    """Preferences of one rank, some of them repeated so that every rank has equally many.

    Args:
        items: Of all ranks, the same on each.
        places: [own] of this rank's items among them.
        counted: [own] bool, False for a repeated one.
        slices: Forward passes over the own ones.
    """

    items: tuple[Preference, ...]
    places: NDArray[np.int64]
    counted: NDArray[np.bool_]
    slices: tuple[slice, ...]

    @property
    def own(self) -> list[Preference]:
        """This rank's items."""
        return [self.items[place] for place in self.places]

    def row_places(self, part: slice) -> list[int]:
        """Places of the rows of some own items among those of all items."""
        size = len(self.items[0].rows)
        return [size * int(place) + n for place in self.places[part] for n in range(size)]

    @property
    def counts(self) -> StepCounts:
        """Numbers over all ranks."""
        return StepCounts(len(self.items), sum(len(item.rows) for item in self.items))


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """Preferences of one optimizer step, and what is known of them before it.

    Args:
        part: Which this rank trains.
        ref_logprobs: [own, answers] sums under the reference; 0 without one.
        tokens_per_chosen, kl: See `PreferenceSums`.
        slopes: [own, answers] derivative of the loss of the step by each sum, where the loss of a
            pair depends on the others; else None.
        loss: Of the step, where it is known from all sums; else None.
    """

    part: PreferencePart
    ref_logprobs: Tensor
    tokens_per_chosen: float
    kl: float = 0.0
    slopes: Tensor | None = None
    loss: float | None = None

    def sums(
        self, items: Sequence[Preference], logprobs: Tensor, ref_logprobs: Tensor
    ) -> PreferenceSums:
        """Sums of chosen and of rejected answers.

        Args:
            items: Some of the step.
            logprobs, ref_logprobs: [items, answers].
        """
        is_good = torch.tensor([item.labels for item in items], device=logprobs.device)
        tokens = logprobs.new_tensor([[row.num_trained for row in item.rows] for item in items])
        chosen, rejected = (
            AnswerSums(logprobs[kind], ref_logprobs[kind], tokens[kind])
            for kind in (is_good, ~is_good)
        )
        return PreferenceSums(chosen, rejected, self.tokens_per_chosen, self.kl)


class PreferenceStage(Stage[PreferenceBatch]):
    """One optimizer step on `train_batch_size` preferences, drawn anew in each pass over the data.

    The mean runs over all pairs (or answers) of the step: of all ranks and micro-batches. What a
    loss needs of the whole step - the order of log-ratios, the KL term - is computed before it from
    a forward pass over all rows.

    Args:
        config: Options of the run; what they leave to the machine is decided.
        strategy: Trains over ranks.
        models: One.
        reference: Frozen; None takes the adapted model without its adapters, where one is needed.
        data: To train on.
        held_out: To evaluate on.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: StrategyBase,
        models: TrainedModels,
        reference: nn.Module | None,
        data: PreferenceRows,
        held_out: Sequence[Preference] = (),
    ) -> None:
        self.config, self.strategy, self.models = config, strategy, models
        self.data, self.held_out = data, held_out
        self.objective: PreferenceObjective = build_objective(config)
        self._reference = reference
        rows = (row for item in (*data.rows, *held_out) for row in item.rows)
        self._pixels = RowPixels.of(data.encoder, rows)
        self._stored: Mapping[int, tuple[float, ...]] = {}
        self._trained_accuracy = math.nan
        self.config = config = configure_models(
            config, strategy, [models.main.model, reference], kept=self.kept_dropout
        )
        if reference is not None:
            reference.eval()
        size = config.train_batch_size // strategy.world_size
        self.loader = strategy.setup_dataloader(data, size, collate_fn=list)
        self._cut = bounded_by_tokens(config, rows_per_item=len(data.rows[0].rows))

    def use_stored(self, stored: StoredReference) -> None:
        """Takes the reference's numbers from a file from now on."""
        self._stored = stored.by_item(self.data.rows, self.held_out)
        self._reference = None

    def reference_sums(self, items: Sequence[Preference]) -> Sums:
        """The reference's sums of each item's answers, on every rank; collective."""
        if not items:
            return ()
        part = self._shared_part(tuple(items))
        (found,) = self._of_all_ranks(part, [self._reference_of(part)])
        return tuple(map(tuple, found.tolist()))

    def planned_steps(self) -> int:
        """See `Stage`."""
        return planned_updates(self.data, self.config, self.strategy)

    def draw(self, step: Step) -> PreferenceBatch:
        """See `Stage`; the reference scores the rows of the step here."""
        items = tuple(self.data.rows[place] for place in drawn_places(step, self.strategy))
        with step.timer.stage("score"):
            return self.batch_of(items, step.number)

    def batch_of(self, items: tuple[Preference, ...], number: int) -> PreferenceBatch:
        """The preferences of one step, distributed over the ranks and scored; collective."""
        strategy, packs = self.strategy, bool(self.config.packing_samples)
        # Both answers lie in one micro-batch, padded to the longer one unless packed.
        lengths = [
            sum(sizes) if packs else len(sizes) * max(sizes)
            for sizes in ([len(row.token_ids) for row in item.rows] for item in items)
        ]
        plan = plan_minibatches(
            lengths,
            train_batch_size=len(items),
            world_size=strategy.num_data_ranks,
            seed=self.config.seed,
            step=number,
        )
        slices = plan.micro_slices(
            lengths,
            index=0,
            rank=strategy.data_rank,
            micro_batch_size=self.config.micro_train_batch_size,
            config=self._cut,
        )
        places = plan.row_index(strategy.data_rank)
        part = PreferencePart(items, places, np.ones(len(places), dtype=np.bool_), tuple(slices))
        return self._scored(part)

    def update(self, batch: PreferenceBatch, step: Step) -> Work:
        """See `Stage`."""
        items = batch.part.items
        rows = [row for item in items for row in item.rows]
        labels = [is_good for item in items for is_good in item.labels]
        observer = open_row_observer(
            "prefer",
            self,
            step,
            [item.rows for item in items],
            (item.rows for item in self.data.rows),
            lambda: {GOOD: np.array(labels)},
        )
        observer.begin_update(self.models.main.name, torch.tensor(float(len(items))))
        result = optimizer_step(
            self.models.main,
            [
                partial(self._share, batch, part, step.metrics, observer)
                for part in batch.part.slices
            ],
            strategy=self.strategy,
            metrics=step.metrics,
            timeout_minutes=self.config.timeout_minutes,
        )
        observer.end_update(result)
        observer.finish()
        record_total("loss", self.strategy, step.metrics)
        return Work(
            (self.models.main.name,),
            np.array([len(row.token_ids) for row in rows], dtype=np.int64),
            np.array([row.num_trained for row in rows], dtype=np.int64),
        )

    def _share(
        self, batch: PreferenceBatch, part: slice, metrics: StepMetrics, observer: RowObserver
    ) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        items = batch.part.own[part]
        padded = pad(
            [row for item in items for row in item.rows],
            self.strategy.device,
            batch.part.row_places(part),
            pixels=self._pixels,
        )
        of_tokens = score_padded(self.models.main.model, padded).logprobs
        logprobs = answer_sums(of_tokens, len(items))
        sums = batch.sums(items, logprobs, batch.ref_logprobs[part])
        if batch.slopes is None:
            share = shown = self.objective.share(sums, batch.part.counts)
        else:
            share = (batch.slopes[part] * logprobs).sum()
            shown = share.new_tensor((batch.loss or 0.0) * len(items) / len(batch.part.items))
        terms = {"policy": shown}
        if self.objective.uses_kl:
            terms["kl"] = share.new_tensor(batch.kl * len(items) / len(batch.part.items))
        reference = batch.ref_logprobs[part].flatten() if self.objective.uses_reference else None
        observer.micro_batch(padded, of_tokens, terms, reference)
        metrics.add_mean("loss", shown, 0.0)
        for name, values in self._shown(sums).items():
            metrics.add_mean(name, values.sum(), len(values))
        return share

    def _shown(self, sums: PreferenceSums) -> dict[str, Tensor]:
        """Metrics of answers and of pairs, whose means are shown."""
        chosen, rejected = self.objective.rewards(sums)
        shown = {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": sums.chosen.mean_logprobs.detach(),
            "rejected_logprob": sums.rejected.mean_logprobs.detach(),
        }
        if self.data.is_paired:
            # Equal rewards decide nothing: half of them are right.
            shown["accuracy"] = (1 + (chosen - rejected).sign()) / 2
        return shown

    def finish(self, batch: PreferenceBatch, metrics: dict[str, float]) -> dict[str, float]:
        """See `Stage`."""
        self._trained_accuracy = metrics.get("accuracy", math.nan)
        return self._completed(metrics, batch)

    def _completed(self, metrics: dict[str, float], batch: PreferenceBatch) -> dict[str, float]:
        """The metrics with the difference of both mean rewards, and the KL term of a loss."""
        more = {"answer_kl": batch.kl} if self.objective.uses_kl else {}
        if {"chosen_reward", "rejected_reward"} <= metrics.keys():
            more["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return metrics | more

    def evaluate(self) -> dict[str, float]:
        """Loss, rewards, accuracy and margin over the held-out preferences."""
        items = tuple(self.held_out)
        if not items:
            return {}
        part = self._shared_part(items)
        batch = self._scored(part)
        logprobs, reference = self._of_all_ranks(
            part, [self._score(self.models.main.model, part), batch.ref_logprobs]
        )
        sums = batch.sums(items, logprobs, reference)
        found = {"loss": float(self.objective.share(sums, part.counts))}
        found |= {n: float(v.mean()) for n, v in self._shown(sums).items() if len(v)}
        found = self._completed(found, batch) | {"num_rows": float(len(items))}
        self._warn_of_swap(found)
        return {f"eval/{name}": value for name, value in found.items()}

    def _shared_part(self, items: tuple[Preference, ...]) -> PreferencePart:
        """This rank's part of all items, in turn."""
        num_ranks = self.strategy.num_data_ranks
        places = np.arange(self.strategy.data_rank, len(items), num_ranks)
        # Every rank makes equally many passes, or sharded layers would wait for each other.
        missing = -(-len(items) // num_ranks) - len(places)
        counted = np.arange(len(places) + missing) < len(places)
        places = np.append(places, np.zeros(missing, dtype=np.int64))
        slices = micro_slices(0, len(places), self.config.micro_train_batch_size)
        return PreferencePart(items, places, counted, tuple(slices))

    def _reference_of(self, part: PreferencePart) -> Tensor:
        """Sums [own, answers] of the reference, computed or read."""
        if not self._stored:
            return self._score(None, part)
        sums = [self._stored[id(item)] for item in part.own]
        return torch.tensor(sums, dtype=torch.float64, device=self.strategy.device)

    def _warn_of_swap(self, found: dict[str, float]) -> None:
        """Writes a line if held-out pairs come out the other way round than trained ones."""
        accuracy, num_pairs = found.get("accuracy", math.nan), found["num_rows"]
        # Two and a half standard deviations of as many coins.
        if self._trained_accuracy > 0.5 > accuracy + 1.25 / math.sqrt(num_pairs):
            self.strategy.print(
                f"warning: the accuracy is {self._trained_accuracy:.2f} on trained pairs and "
                f"{accuracy:.2f} on {num_pairs:.0f} held-out ones, worse than by chance: chosen "
                "and rejected may be swapped in one of both data sets"
            )

    def prove_equal_start(self) -> None:
        """Proves that model and reference, which start from the same weights, score alike.

        Raises:
            ModelLoadError: The margin of a pair is not 0 before the first step.
        """
        if not self.objective.uses_reference:
            return
        num_items = min(len(self.data), self.config.micro_train_batch_size)
        places = np.arange(num_items)
        counted = np.ones(num_items, dtype=np.bool_)
        part = PreferencePart(self.data.rows[:num_items], places, counted, (slice(0, num_items),))
        self.models.main.model.eval()
        own = self._score(self.models.main.model, part)
        tokens = own.new_tensor([[row.num_trained for row in item.rows] for item in part.items])
        difference = float(((own - self._reference_of(part)).abs() / tokens).max())
        worst = self.strategy.all_reduce(difference, op="max")
        has_gpu = self.strategy.device.type == "cuda"
        floor = BF16_ROUNDING if self.config.computes_in_bf16(has_gpu=has_gpu) else ROUNDING
        if not worst <= floor:
            raise ModelLoadError(
                f"model and reference start from the same weights, and differ by {worst:.3g} nats "
                f"a token (expected at most {floor:g}): their margin is not 0 before the first "
                "step; look for dropout, another dtype or an adapter in the checkpoint"
            )

    def _scored(self, part: PreferencePart) -> PreferenceBatch:
        """What the step knows of its rows before it, from forward passes without gradient."""
        objective, model = self.objective, self.models.main.model
        size = (len(part.places), len(part.items[0].rows))
        reference = torch.zeros(size, dtype=torch.float64, device=self.strategy.device)
        if objective.uses_reference:
            reference = self._reference_of(part)
        batch = PreferenceBatch(part, reference, tokens_per_chosen(part.items))
        if objective.uses_kl:
            batch = replace(batch, kl=self._kl(part))
        if not objective.couples_pairs:
            return batch
        logprobs, ref_logprobs = self._of_all_ranks(part, [self._score(model, part), reference])
        logprobs.requires_grad_()
        loss = objective.share(batch.sums(part.items, logprobs, ref_logprobs), part.counts)
        (slopes,) = torch.autograd.grad(loss, logprobs)
        return replace(batch, slopes=slopes[torch.from_numpy(part.places)], loss=loss.item())

    def _kl(self, part: PreferencePart) -> float:
        """Mean log-ratio of answers behind other prompts over all ranks, at least 0; collective."""
        others = [other_answers(part.items, place) for place in part.places]
        counted = part.counted & np.array([each is not None for each in others])
        rows = [
            item.rows if other is None else other
            for item, other in zip(part.own, others, strict=True)
        ]
        model = self.models.main.model
        ratios = self._score_rows(model, rows, part.slices)
        ratios -= self._score_rows(None, rows, part.slices)
        kept = ratios[torch.from_numpy(counted).to(ratios.device)]
        both = torch.stack([kept.sum(), kept.new_tensor(float(kept.numel()))])
        total, count = self.strategy.reduce_over_data(both, "sum").tolist()
        return max(0.0, total / count) if count else 0.0

    def _of_all_ranks(self, part: PreferencePart, values: Sequence[Tensor]) -> list[Tensor]:
        """Values [own, answers] as those of all ranks, [items, answers]; one collective."""
        stacked = torch.stack(list(values), dim=-1)
        whole = stacked.new_zeros((len(part.items), *stacked.shape[1:]))
        is_own = torch.from_numpy(part.counted).to(stacked.device)
        whole[torch.from_numpy(part.places[part.counted]).to(stacked.device)] = stacked[is_own]
        return list(self.strategy.reduce_over_data(whole, "sum").unbind(dim=-1))

    def _score(self, model: nn.Module | None, part: PreferencePart) -> Tensor:
        """Sums [own, answers] of this rank's rows without gradient; None is the reference."""
        return self._score_rows(model, [item.rows for item in part.own], part.slices)

    def _score_rows(
        self,
        model: nn.Module | None,
        rows: Sequence[tuple[SupervisedRow, ...]],
        slices: Sequence[slice],
    ) -> Tensor:
        main = self.models.main.model
        off: AbstractContextManager[None] = nullcontext()
        if model is None and self._reference is None:
            adapted = self.strategy.unwrap_model(main)
            if not isinstance(adapted, LoraActor):
                raise RuntimeError("a reference is needed where there are no adapters to leave out")
            off = adapted.adapters_off()
        parts = []
        with torch.no_grad(), off:
            for each in slices:
                with phase("score", timedelta(minutes=self.config.timeout_minutes)):
                    parts.append(self._sums(model or self._reference or main, rows[each]))
        return torch.cat(parts)

    def _sums(
        self, model: nn.Module, items: Sequence[Preference] | Sequence[tuple[SupervisedRow, ...]]
    ) -> Tensor:
        """Sums [items, answers] of the logprobs of the answers' tokens, in float64."""
        groups = [item if isinstance(item, tuple) else item.rows for item in items]
        rows = [row for group in groups for row in group]
        output = score_rows(model, rows, self.strategy.device, pixels=self._pixels)
        return answer_sums(output.logprobs, len(groups))


def answer_sums(logprobs: Tensor, num_items: int) -> Tensor:
    """[items, answers] sums of logprobs [items * answers, seq] over the tokens, in float64."""
    return logprobs.double().sum(dim=1).view(num_items, -1)


def tokens_per_chosen(items: Sequence[Preference]) -> float:
    """Mean tokens of a chosen (or good) answer; 1 without one."""
    tokens = [
        row.num_trained
        for item in items
        for row, is_good in zip(item.rows, item.labels, strict=True)
        if is_good
    ]
    return sum(tokens) / len(tokens) if tokens else 1.0


def other_answers(items: Sequence[Preference], place: int) -> tuple[SupervisedRow, ...] | None:
    """The answers of the next item with another prompt, behind the prompt of the one at `place`."""
    own = items[place].rows[0]
    for step in range(1, len(items)):
        rows = items[(place + step) % len(items)].rows
        if rows[0].prompt_key != own.prompt_key:
            return tuple(behind(own.prompt_ids, row, own.shown) for row in rows)
    return None


def behind(
    prompt: NDArray[np.int32], row: SupervisedRow, shown: ShownMedia | None = None
) -> SupervisedRow:
    """The answer of a row behind another prompt, and the media of that."""
    start = int(row.is_trained.argmax())
    return SupervisedRow(
        np.concatenate([prompt, row.token_ids[start:]]),
        np.concatenate([np.zeros(len(prompt), dtype=np.bool_), row.is_trained[start:]]),
        shown,
    )
