"""Objective of preferences: the mean of a function of sums over the tokens of answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightrft.algorithms.preference_losses import AnswerSums, PreferenceSums
from lightrft.datasets.preference_rows import Preference
from lightrft.datasets.row_data import RowData, ShownMedia, SupervisedRow
from lightrft.models.loading import ModelLoadError
from lightrft.models.lora import LoraActor
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.observer import Facts
from lightrft.stages.preference.preference_loss import PreferenceLoss
from lightrft.stages.preference.stored_reference import Sums
from lightrft.stages.rows.row_objective import LossShare, RowBatch, RowObjective
from lightrft.stages.rows.row_passes import MicroBatch, RowPart, RowPasses, shared_part
from lightrft.strategy.backend import inner_module
from lightrft.strategy.distributed.deadlines import phase

# Nats per token by which rounding separates two equal forward passes: in float32, in bfloat16.
ROUNDING, BF16_ROUNDING = 1e-5, 1e-2
# Name of the fact about each row for observers.
GOOD = "is_good"
# Rows of the answers to one prompt.
Rows = tuple[SupervisedRow, ...]


@dataclass(frozen=True, slots=True)
class KnownPreferences:
    """Data about the preferences of a step that are known before its update.

    Args:
        counts: Numbers of items and answers of the step, over all ranks.
        tokens_per_chosen, kl: See `PreferenceSums`.
        ref_logprobs: [local, answers] sums under the reference; 0 without one.
        slopes: [local, answers] derivatives of the step's loss by each sum, if the loss of a pair
            depends on other pairs; else None.
        loss: Loss of the step, if it is known from all sums; else None.
    """

    counts: tuple[int, int]
    tokens_per_chosen: float
    ref_logprobs: Tensor
    kl: float = 0.0
    slopes: Tensor | None = None
    loss: float | None = None

    def sums(
        self, items: Sequence[Preference], logprobs: Tensor, ref_logprobs: Tensor
    ) -> PreferenceSums:
        """Return the sums of chosen and of rejected answers.

        Args:
            items: Some items of the step.
            logprobs, ref_logprobs: [items, answers].
        """
        is_good = torch.tensor([item.labels for item in items], device=logprobs.device)
        tokens = logprobs.new_tensor([[row.num_trained for row in item.rows] for item in items])
        chosen, rejected = (
            AnswerSums(logprobs[kind], ref_logprobs[kind], tokens[kind])
            for kind in (is_good, ~is_good)
        )
        return PreferenceSums(chosen, rejected, self.tokens_per_chosen, self.kl)


@dataclass(frozen=True, slots=True)
class PreferenceObjective(RowObjective[Preference, KnownPreferences]):
    """Mean of a loss over all pairs (or answers) of a step.

    Values of the whole step that a loss needs (the order of log-ratios, the KL term) come from a
    forward pass over all rows before the update.

    Args:
        loss: Loss of a pair or an answer.
        reference: Frozen model; None uses the adapted model without its adapters.
        stored: Sums of the reference by the identity of an item, if they come from a file.
    """

    name: ClassVar[str] = "prefer"
    measured_as: ClassVar[str | None] = "score"

    loss: PreferenceLoss
    reference: nn.Module | None = None
    stored: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def frozen(self) -> Sequence[nn.Module]:
        """Reference, if it is a separate model."""
        return () if self.reference is None else (self.reference,)

    def measure(self, part: RowPart[Preference], number: int = 0) -> KnownPreferences:
        """Compute the values of the whole step, in forward passes without gradient."""
        size = (len(part.places), len(part.items[0].rows))
        reference = torch.zeros(size, dtype=torch.float64, device=part.passes.device)
        if self.loss.uses_reference:
            reference = self.reference_sums(part)
        known = KnownPreferences(counts_of(part.items), tokens_per_chosen(part.items), reference)
        if self.loss.uses_kl:
            known = replace(known, kl=self._kl(part))
        if not self.loss.couples_pairs:
            return known
        local = score_items(part.passes.model, rows_of(part.local_items), part)
        logprobs, ref_logprobs = of_all_ranks(part, [local, reference])
        with torch.enable_grad():
            logprobs.requires_grad_()
            sums = known.sums(part.items, logprobs, ref_logprobs)
            loss = self.loss.share(sums, known.counts)
        (slopes,) = torch.autograd.grad(loss, logprobs)
        return replace(known, slopes=slopes[torch.from_numpy(part.places)], loss=loss.item())

    def normalizer(self, part: RowPart[Preference], known: KnownPreferences) -> Tensor:
        """Return the number of items, []."""
        return torch.tensor(float(len(part.items)))

    def facts(self, items: Sequence[Preference]) -> Facts:
        """Return whether each answer is good."""
        return {GOOD: np.array([is_good for item in items for is_good in item.labels])}

    def share(
        self,
        micro: MicroBatch[Preference],
        known: KnownPreferences,
        metrics: StepMetrics,
    ) -> LossShare:
        """Compute the share of a micro-batch in the loss."""
        items, num_items = micro.items, known.counts[0]
        of_tokens = micro.passes.score(micro.rows).logprobs
        logprobs, ref_logprobs = answer_sums(of_tokens, len(items)), known.ref_logprobs[micro.where]
        sums = known.sums(items, logprobs, ref_logprobs)
        if known.slopes is None:
            share = shown = self.loss.share(sums, known.counts)
        else:
            share = (known.slopes[micro.where] * logprobs).sum()
            shown = share.new_tensor((known.loss or 0.0) * len(items) / num_items)
        terms = {"policy": shown}
        if self.loss.uses_kl:
            terms["kl"] = share.new_tensor(known.kl * len(items) / num_items)
        for name, values in self._shown(sums, items).items():
            metrics.add_mean(name, values.sum(), len(values))
        reference = ref_logprobs.flatten() if self.loss.uses_reference else None
        return LossShare(share, terms, micro.rows, of_tokens, reference)

    def _shown(self, sums: PreferenceSums, items: Sequence[Preference]) -> dict[str, Tensor]:
        """Return metrics of answers and of pairs, whose means are shown."""
        chosen, rejected = self.loss.rewards(sums)
        shown = {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": sums.chosen.mean_logprobs.detach(),
            "rejected_logprob": sums.rejected.mean_logprobs.detach(),
        }
        if len(items[0].rows) > 1:
            # A tie counts as half right.
            shown["accuracy"] = (1 + (chosen - rejected).sign()) / 2
        return shown

    def finish(
        self,
        batch: RowBatch[Preference, KnownPreferences],
        metrics: dict[str, float],
    ) -> dict[str, float]:
        """Complete the metrics of a step."""
        return self._completed(metrics, batch.known)

    def _completed(self, metrics: dict[str, float], known: KnownPreferences) -> dict[str, float]:
        """Add the difference of both mean rewards, and the KL term of a loss."""
        more = {"answer_kl": known.kl} if self.loss.uses_kl else {}
        if {"chosen_reward", "rejected_reward"} <= metrics.keys():
            more["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return metrics | more

    def evaluate(self, part: RowPart[Preference]) -> dict[str, float]:
        """Compute loss, rewards, accuracy and margin."""
        known = self.measure(part)
        return self._completed(self.mean_shares(part, known), known)

    def doubts(
        self, held_out: Mapping[str, float], trained: Mapping[str, float] | None, num_items: int
    ) -> list[str]:
        """Report held-out pairs that come out the other way round than trained ones."""
        trained_accuracy = (trained or {}).get("accuracy", math.nan)
        accuracy = held_out.get("accuracy", math.nan)
        # Two and a half standard deviations of as many coin tosses.
        if not trained_accuracy > 0.5 > accuracy + 1.25 / math.sqrt(num_items):
            return []
        return [
            f"the accuracy is {trained_accuracy:.2f} on trained pairs and {accuracy:.2f} on "
            f"{num_items} held-out ones, worse than by chance: chosen and rejected may be swapped "
            "in one of both data sets"
        ]

    def prove_equal_start(self, data: RowData[Preference], passes: RowPasses) -> None:
        """Prove that model and reference, which start from the same weights, score alike.

        Raises:
            ModelLoadError: The margin of a pair is not 0 before the first step.
        """
        if not self.loss.uses_reference:
            return
        num_items = min(len(data), passes.config.micro_train_batch_size)
        first = data.rows[:num_items]
        part = RowPart(passes, first, np.arange(num_items), (slice(0, num_items),), num_items)
        passes.model.eval()
        logprobs = score_items(passes.model, rows_of(first), part)
        tokens = logprobs.new_tensor([[row.num_trained for row in item.rows] for item in first])
        distance = (logprobs - self.reference_sums(part)).abs() / tokens
        worst = passes.context.all_reduce(float(distance.max()), op="max")
        floor = BF16_ROUNDING if passes.context.computes_in_bf16 else ROUNDING
        if not worst <= floor:
            raise ModelLoadError(
                f"model and reference start from the same weights, and differ by {worst:.3g} nats "
                f"a token (expected at most {floor:g}): their margin is not 0 before the first "
                "step; look for dropout, another dtype or an adapter in the checkpoint"
            )

    def sums_of_all(self, items: Sequence[Preference], passes: RowPasses) -> Sums:
        """Compute the reference's sums of each item's answers, on every rank; collective."""
        if not items:
            return ()
        part = shared_part(items, passes)
        (sums,) = of_all_ranks(part, [self.reference_sums(part)])
        return tuple(map(tuple, sums.tolist()))

    def reference_sums(self, part: RowPart[Preference]) -> Tensor:
        """Return the reference's sums [local, answers], computed or read."""
        if not self.stored:
            return self._score_by_reference(rows_of(part.local_items), part)
        sums = [self.stored[id(item)] for item in part.local_items]
        return torch.tensor(sums, dtype=torch.float64, device=part.passes.device)

    def _kl(self, part: RowPart[Preference]) -> float:
        """Return the mean log-ratio of answers behind other prompts, at least 0; collective."""
        others = [other_answers(part.items, place) for place in part.places]
        counted = part.is_counted & np.array([each is not None for each in others])
        answers = [
            rows if other is None else other
            for rows, other in zip(rows_of(part.local_items), others, strict=True)
        ]
        ratios = score_items(part.passes.model, answers, part)
        ratios -= self._score_by_reference(answers, part)
        kept = ratios[torch.from_numpy(counted).to(ratios.device)]
        both = torch.stack([kept.sum(), kept.new_tensor(float(kept.numel()))])
        total, count = part.passes.context.reduce_over_data(both, "sum").tolist()
        return max(0.0, total / count) if count else 0.0

    def _score_by_reference(self, answers: Sequence[Rows], part: RowPart[Preference]) -> Tensor:
        """Compute the sums of answers under the reference."""
        with self._reference(part.passes) as model:
            return score_items(model, answers, part)

    @contextmanager
    def _reference(self, passes: RowPasses) -> Iterator[nn.Module]:
        """Yield the reference."""
        if self.reference is not None:
            yield self.reference
            return
        adapted = inner_module(passes.model)
        if not isinstance(adapted, LoraActor):
            raise RuntimeError("a reference is needed where there are no adapters to leave out")
        with adapted.adapters_off():
            yield passes.model


def rows_of(items: Sequence[Preference]) -> list[Rows]:
    """Return the rows of each item's answers."""
    return [tuple(item.rows) for item in items]


def score_items(model: nn.Module, answers: Sequence[Rows], part: RowPart[Preference]) -> Tensor:
    """Compute sums [local, answers] of the logprobs of the answers' tokens, without gradient.

    Args:
        model: Model that scores.
        answers: Answers of this rank's items, or replacements for them.
        part: Distribution with the micro-batches.
    """
    timeout = timedelta(minutes=part.passes.config.timeout_minutes)
    scorer = replace(part.passes, model=model)
    parts = []
    with torch.no_grad():
        for where in part.slices:
            with phase("score", timeout):
                chosen = answers[where]
                rows = scorer.pad([row for each in chosen for row in each])
                parts.append(answer_sums(scorer.score(rows).logprobs, len(chosen)))
    return torch.cat(parts)


def of_all_ranks(part: RowPart[Preference], values: Sequence[Tensor]) -> list[Tensor]:
    """Return values [local, answers] gathered from all ranks, [items, answers]; one collective."""
    stacked = torch.stack(list(values), dim=-1)
    whole = stacked.new_zeros((len(part.items), *stacked.shape[1:]))
    is_counted = torch.from_numpy(part.is_counted).to(stacked.device)
    places = torch.from_numpy(part.places).to(stacked.device)
    whole[places[is_counted]] = stacked[is_counted]
    return list(part.passes.context.reduce_over_data(whole, "sum").unbind(dim=-1))


def counts_of(items: Sequence[Preference]) -> tuple[int, int]:
    """Count items and answers."""
    return len(items), sum(len(item.rows) for item in items)


def answer_sums(logprobs: Tensor, num_items: int) -> Tensor:
    """Return sums [items, answers] of logprobs [items * answers, seq], in float64."""
    return logprobs.double().sum(dim=1).view(num_items, -1)


def tokens_per_chosen(items: Sequence[Preference]) -> float:
    """Return the mean number of tokens of a chosen (or good) answer; 1 without one."""
    tokens = [
        row.num_trained
        for item in items
        for row, is_good in zip(item.rows, item.labels, strict=True)
        if is_good
    ]
    return sum(tokens) / len(tokens) if tokens else 1.0


def other_answers(items: Sequence[Preference], place: int) -> Rows | None:
    """Return the answers of the next item with another prompt, behind this item's prompt."""
    first = items[place].rows[0]
    for step in range(1, len(items)):
        rows = items[(place + step) % len(items)].rows
        if rows[0].prompt_key != first.prompt_key:
            return tuple(behind(first.prompt_ids, row, first.shown) for row in rows)
    return None


def behind(
    prompt: NDArray[np.int32], row: SupervisedRow, shown: ShownMedia | None = None
) -> SupervisedRow:
    """Return the answer of a row behind another prompt with its media."""
    start = int(row.is_trained.argmax())
    return SupervisedRow(
        np.concatenate([prompt, row.token_ids[start:]]),
        np.concatenate([np.zeros(len(prompt), dtype=np.bool_), row.is_trained[start:]]),
        shown,
    )
