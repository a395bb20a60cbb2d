"""Objective of a step on preferences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrft.tools.audit.batches import items_of
from lightrft.tools.audit.models import Scorer, frozen_state
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.preference_losses import (
    OTHER_NAMES,
    PREFERENCE_LOSSES,
    WITHOUT_REFERENCE,
    Answers,
    Pairs,
    kto,
)
from lightrft.tools.audit.record import RecordError
from lightrft.tools.audit.replay import ReplayedStep
from lightrft.tools.audit.updates import (
    Objective,
    Objectives,
    Terms,
    Update,
    trained_model,
    with_options,
)

GOOD = "is_good"


def answer_places(step: ReplayedStep) -> Tensor:
    """Return [rows, seq] bool: the tokens of answers, as in the data."""
    is_good = step.record.samples.facts.get(GOOD)
    if is_good is None or len(is_good) != len(step.mask):
        raise RecordError(f"{step.record.folder} does not say which answers are better")
    return step.mask


class PreferenceReplay:
    """Loss of a model on pairs of answers or on labelled answers.

    Args:
        step: Step under audit.
        scorer: Plain model of the trained model.
        folder: Folder of the reference model.
    """

    def __init__(self, step: ReplayedStep, scorer: Scorer, folder: Path) -> None:
        self._step, self._scorer, self._folder = step, scorer, folder
        known = PREFERENCE_LOSSES | OTHER_NAMES
        self._losses = [known[name] for name in step.config.preference_loss if name in known]
        self._is_good = torch.from_numpy(step.record.samples.facts[GOOD]).bool()
        self._tokens = step.mask.sum(dim=1).double()

    def terms(self, draw: Draw, update: Update, outputs: Sequence[Pair]) -> Terms:
        """Compare what the loss reads beside scores; return the parts of the step's loss."""
        step, config, scores = self._step, self._step.config, outputs[0]
        error = torch.where(update.mask, step.rounding(scores.exact.detach()), 0.0)
        # Errors of single tokens have independent signs.
        doubts = 3 * (error**2).sum(dim=1).sqrt()
        reference = draw.move(self._reference(update.mask, doubts), doubts)
        z = self._check_z(update)
        sums = scores.map(lambda each: torch.where(update.mask, each, 0.0).sum(dim=1))
        chosen, rejected = (
            Answers(sums.at(which), reference.at(which), self._tokens[which])
            for which in (self._is_good, ~self._is_good)
        )
        pairs = Pairs(chosen, rejected, z, float(doubts.max()))
        weights = config.preference_weights or (1.0,) * len(self._losses)
        parts = []
        for loss, weight in zip(self._losses, weights, strict=True):
            values = with_options(loss, config.preference_args)(pairs)
            parts.append(weight / len(values) * values)
        return {"policy": (1.0, torch.cat(parts))}

    def _reference(self, mask: Tensor, doubts: Tensor) -> Pair:
        """Return and check reference log-probabilities of answers; 0 if no loss reads them."""
        step, findings, seen = self._step, self._step.results, self._step.record.values.ref_logprobs
        is_wanted = not set(self._losses) <= set(WITHOUT_REFERENCE)
        findings.number("has a reference", seen.size > 0, is_wanted)
        if not seen.size or not is_wanted:
            return Pair(0 * doubts, 0 * doubts)
        self._scorer.load(frozen_state(self._folder))
        recomputed = self._scorer.score(step.rows.ids, mask)[0].sum(dim=1)
        run, one = step.rows.padded(seen).sum(dim=1), torch.ones(len(mask), 1, dtype=torch.bool)
        findings.tokens(
            "sums of the reference",
            Pair(recomputed[:, None], run[:, None]),
            one,
            "logprobs",
            floor=doubts[:, None],
        )
        return Pair(recomputed, run)

    def _check_z(self, update: Update) -> float:
        """Return the mean log-ratio of mismatched answers, at least 0; 0 if no loss needs it."""
        if kto not in self._losses:
            return 0.0
        answers = self._others()
        ratios, moved = torch.zeros(1, dtype=torch.float64), 0.0
        if answers:
            ids, mask = (
                pad_sequence(list(each), batch_first=True) for each in zip(*answers, strict=True)
            )
            self._scorer.load(frozen_state(self._folder))
            reference = self._scorer.score(ids, mask)[0]
            self._scorer.load(update.state)
            logprobs = self._scorer.score(ids, mask)[0]
            ratios = (logprobs - reference).sum(dim=1)
            error = torch.where(mask, self._step.rounding(logprobs), 0.0)
            moved = 6 * float((error**2).sum().sqrt()) / len(logprobs)
        z, size = max(0.0, float(ratios.mean())), float(ratios.abs().mean())
        seen = update.facts.losses.get("kl", float("nan"))
        name = f"log-ratio behind other prompts, {update.name}"
        self._step.results.number(name, seen, z, "loss", scale=size, floor=moved)
        return z

    def _others(self) -> list[tuple[Tensor, Tensor]]:
        """Return prompts before answers of the next item with another prompt, and masks."""
        rows, items = self._step.rows, items_of(self._step)
        starts = rows.mask.int().argmax(dim=1).tolist()
        prompts = [ids[:start] for ids, start in zip(rows.ids, starts, strict=True)]
        number, answers = items[-1] + 1, []
        for item in range(number):
            prompt = prompts[items.index(item)]
            turn = [(item + n) % number for n in range(1, number)]
            behind = [n for n in turn if not torch.equal(prompts[items.index(n)], prompt)][:1]
            for row in (row for row, member in enumerate(items) if member in behind):
                part = slice(starts[row], int(rows.lengths[row]))
                ids = torch.cat([prompt, rows.ids[row, part]])
                is_answer = torch.cat([torch.zeros_like(prompt).bool(), rows.mask[row, part]])
                answers.append((ids, is_answer))
        return answers


def preference_objectives(step: ReplayedStep, reference: Path | None) -> Objectives:
    """Return the objective of the trained model."""
    config, scorer = step.config, trained_model(step)
    loss = PreferenceReplay(step, scorer, reference or Path(str(config.pretrain)))
    unknown = [n for n in config.preference_loss if n not in PREFERENCE_LOSSES | OTHER_NAMES]
    ended = f"preference loss {unknown[0]} is the caller's own" if unknown else ""
    size = float(config.train_batch_size)
    return lambda draw: {
        "actor": Objective(scorer, "logprobs", lambda _: size, partial(loss.terms, draw), ended)
    }
