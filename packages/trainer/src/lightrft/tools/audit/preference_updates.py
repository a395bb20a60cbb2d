"""Objective of a step on preferences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.tools.audit.models import Scorer, frozen_state
from lightrft.tools.audit.pairs import Borders, Differentiated, Pair, with_rounding
from lightrft.tools.audit.preference_losses import Answers, Pairs, preference_loss_named
from lightrft.tools.audit.record import Flags, Integers, RecordError
from lightrft.tools.audit.replay import ReplayedStep
from lightrft.tools.audit.stored_rows import items_of
from lightrft.tools.audit.updates import LossTerm, ReplayedLoss, Update, trained_model

GOOD = "is_good"


def answer_places(step: ReplayedStep) -> Flags:
    """Return [rows, seq] bool: the tokens of answers, as in the data."""
    if step.record.samples.facts.get(GOOD, np.zeros(0)).shape != step.rows.lengths.shape:
        raise RecordError(f"{step.record.folder} does not say which answers are better")
    return step.rows.mask


class PreferenceReplay(ReplayedLoss):
    """Loss of a model on pairs of answers or on labelled answers.

    Args:
        step: Step under audit.
        scorer: Plain model of the trained model.
        reference: Folder of the reference model; None uses the option `pretrain`.
    """

    scores = "logprobs"

    def __init__(self, step: ReplayedStep, scorer: Scorer, reference: Path | None) -> None:
        losses = {name: preference_loss_named(name) for name in step.config.preference_loss}
        unknown = [name for name, loss in losses.items() if loss is None]
        super().__init__(
            step, scorer, f"preference loss {unknown[0]} is the caller's own" if unknown else ""
        )
        self._model, self._folder = scorer, reference or Path(str(step.config.pretrain))
        self._losses = [loss for loss in losses.values() if loss is not None]
        self._is_good = torch.from_numpy(step.record.samples.facts[GOOD].astype(np.bool_))
        self._tokens = torch.from_numpy(step.rows.mask.sum(axis=1).astype(np.float64))

    def denominator(self, mask: Tensor) -> float:
        """Return the number of items per step."""
        return float(self.step.config.train_batch_size)

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the preference loss."""
        mask, tokens = update.mask, self._tokens.clamp(min=1.0)
        # Errors of single tokens have independent signs.
        doubts = 3 * (error**2).sum(dim=1).sqrt()
        reference, z = self._reference(mask, doubts), self._check_z(update)
        run = scores.run.where(mask, 0.0).sum(dim=1)

        def loss(new: Pair, _: Borders) -> Tensor:
            sums = Pair(new.exact.where(mask, 0.0).sum(dim=1), run)
            return self._values(sums, reference, z, float(doubts.max()))

        # Sums of the reference have the same rounding error.
        apart = torch.where(self._is_good, 2.0, -2.0) * doubts
        shifts = [
            torch.where(mask, (sums / tokens)[:, None], 0.0)
            for sums in (apart, -apart, apart.abs(), -apart.abs())
        ]
        exact, moved = with_rounding(loss, scores, shifts, self.step.borders)
        # All tokens of an answer have the same derivative, so its rounding error is shared.
        shared = moved.slope * tokens.sqrt()[:, None]
        yield LossTerm("policy", 1.0, exact, Differentiated(moved.value, shared))

    def _values(self, sums: Pair, reference: Pair, z: float, doubt: float) -> Tensor:
        """Return the parts of the step's loss from the log-probability of each answer."""
        is_good, config = self._is_good, self.step.config
        chosen, rejected = (
            Answers(
                sums.exact[which],
                reference.exact[which],
                self._tokens[which],
                sums.run[which],
                reference.run[which],
            )
            for which in (is_good, ~is_good)
        )
        mean_tokens = float(chosen.tokens.mean()) if len(chosen.tokens) else 1.0
        pairs = Pairs(chosen, rejected, mean_tokens, z, doubt)
        weights = config.preference_weights or (1.0,) * len(self._losses)
        args, parts = config.preference_args or {}, []
        for loss, weight in zip(self._losses, weights, strict=True):
            options = {n: float(args.get(n, value)) for n, value in loss.defaults.items()}
            number = len(self._tokens) if loss.of_answers else config.train_batch_size
            parts.append(weight / number * loss.function(pairs, options))
        return torch.cat(parts)

    def _reference(self, mask: Tensor, doubts: Tensor) -> Pair:
        """Return and check reference log-probabilities of answers; 0 if no loss reads them."""
        step, findings, seen = self.step, self.step.results, self.step.record.values.ref_logprobs
        is_wanted = any(loss.has_reference for loss in self._losses)
        findings.number("has a reference", seen.size > 0, is_wanted)
        if not seen.size or not is_wanted:
            return Pair(0 * doubts, 0 * doubts)
        self._model.load(frozen_state(self._folder))
        recomputed = self._model.score(step.rows.ids, mask)[0].sum(dim=1, keepdim=True)
        run = torch.from_numpy(step.rows.padded(seen)).sum(dim=1, keepdim=True)
        findings.tokens(
            "sums of the reference",
            run,
            recomputed,
            torch.ones_like(recomputed, dtype=torch.bool),
            "logprobs",
            floor=lambda: doubts[:, None],
        )
        return Pair(recomputed[:, 0], run[:, 0])

    def _check_z(self, update: Update) -> float:
        """Return the mean log-ratio of mismatched answers, at least 0; 0 if no loss needs it."""
        if not any("desirable_weight" in loss.defaults for loss in self._losses):
            return 0.0
        ids, mask = self._others()
        ratios, moved = torch.zeros(1, dtype=torch.float64), 0.0
        if len(ids):
            self._model.load(frozen_state(self._folder))
            reference = self._model.score(ids, mask)[0]
            self._model.load(update.state)
            logprobs = self._model.score(ids, mask)[0]
            ratios = (logprobs - reference).sum(dim=1)
            error = torch.where(mask, self.step.rounding(logprobs, "logprobs"), 0.0)
            moved = 6 * float((error**2).sum().sqrt()) / len(logprobs)
        z, size = max(0.0, float(ratios.mean())), float(ratios.abs().mean())
        seen = update.facts.losses.get("kl", float("nan"))
        name = f"log-ratio behind other prompts, {update.name}"
        self.step.results.number(name, seen, z, "loss", scale=size, floor=moved)
        return z

    def _others(self) -> tuple[Integers, Tensor]:
        """Return each prompt followed by answers of the next item with another prompt."""
        rows, items = self.step.rows, items_of(self.step)
        starts = rows.mask.argmax(axis=1)
        texts = [tuple(rows.ids[row, :start]) for row, start in enumerate(starts)]
        number, answers = items[-1] + 1, []
        for item in range(number):
            prompt = texts[items.index(item)]
            turn = [(item + n) % number for n in range(1, number)]
            behind = [n for n in turn if texts[items.index(n)] != prompt][:1]
            for row in (row for row, member in enumerate(items) if member in behind):
                part = slice(starts[row], rows.lengths[row])
                trained = [False] * len(prompt) + rows.mask[row, part].tolist()
                answers.append(([*prompt, *rows.ids[row, part].tolist()], trained))
        width = max((len(ids) for ids, _ in answers), default=0)
        ids, mask = (
            np.zeros((len(answers), width), np.int64),
            torch.zeros(len(answers), width).bool(),
        )
        for row, (text, trained) in enumerate(answers):
            ids[row, : len(text)], mask[row, : len(text)] = text, torch.tensor(trained)
        return ids, mask


def preference_objectives(step: ReplayedStep, reference: Path | None) -> dict[str, ReplayedLoss]:
    """Return the objective of the trained model."""
    return {"actor": PreferenceReplay(step, trained_model(step), reference)}
