"""The update of a step on preferences."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.tools.audit.corrections import Pair
from lightrft.tools.audit.given_rows import check_given, differentiated, in_items, items_of
from lightrft.tools.audit.losses import Term
from lightrft.tools.audit.models import Scorer, frozen_state
from lightrft.tools.audit.preference_losses import (
    Answers,
    Pairs,
    preference_loss_named,
)
from lightrft.tools.audit.record import Array, Flags, Integers, RecordError
from lightrft.tools.audit.replay import Step, build_policy
from lightrft.tools.audit.updates import Slopes, StageAudit, Update, Updates, trained_model

GOOD = "is_good"


def check_answers(step: Step) -> Flags:
    """[rows, seq] the tokens of answers, as the data have them."""
    if step.record.samples.facts.get(GOOD, np.zeros(0)).shape != step.rows.lengths.shape:
        raise RecordError(f"{step.record.folder} does not say which answers are better")
    return step.rows.mask


class PreferenceUpdates(Updates):
    """One update on pairs of answers, or on labelled ones.

    Args:
        step: What is audited.
        scorer: Its plain model.
        reference: Folder of the reference; None takes `pretrain` of the options.
        is_configured: See `Updates`.
    """

    def __init__(
        self, step: Step, scorer: Scorer, reference: Path | None, *, is_configured: bool
    ) -> None:
        super().__init__(step, is_configured=is_configured)
        self._scorer, self._folder = scorer, reference or Path(str(step.config.pretrain))
        self._is_good = step.record.samples.facts[GOOD].astype(np.bool_)
        names = step.config.preference_loss
        unknown = [name for name in names if preference_loss_named(name) is None]
        if unknown:
            self._ended["actor"] = f"preference loss {unknown[0]} is the caller's own"
        found = map(preference_loss_named, names)
        self._losses = [loss for loss in found if loss is not None]
        tokens = step.rows.mask.sum(axis=1)
        self._tokens = tokens.astype(np.float64)
        self._mean_tokens = float(tokens[self._is_good].mean()) if self._is_good.any() else 1.0

    def _denominator(self, mask: Flags) -> float:
        del mask
        return float(self.step.config.train_batch_size)

    def _slopes(self, update: Update) -> Slopes:
        step, mask = self.step, update.mask
        self._scorer.load(self._optimizers["actor"].weights)
        own = self._scorer.score(step.rows.ids, mask)[0]
        new = Pair(own, own if update.new is None else update.new)
        error = self._check_scores("logprobs", update, new, self._scorer)
        sums = new.map(lambda each: np.where(mask, each, 0.0).sum(axis=1))
        # Errors of single tokens have independent signs.
        doubts = 3 * np.sqrt((error**2).sum(axis=1))
        reference = self._reference(update, doubts)
        z = self._check_z(update)

        def loss(shift: Array) -> tuple[float, Array]:
            return differentiated(
                lambda own: self._total(Pair(own, sums.run), reference, z, doubts), sums.own + shift
            )

        value, slopes = loss(np.zeros(len(own)))
        turned, moved, apart = np.zeros(len(own)), 0.0, np.where(self._is_good, 2.0, -2.0)
        # Reference sums are rounded alike.
        for shift in (apart, -apart, np.abs(apart), -np.abs(apart)):
            other, others = loss(shift * doubts)
            moved, turned = max(moved, abs(other - value)), np.maximum(turned, abs(others - slopes))
        self._check_loss("policy", update, _single(value, mask), _single(moved, mask))
        # The tokens of an answer share their derivative, and so its rounding.
        wide = np.where(mask, slopes[:, None], 0.0)
        noise = np.where(mask, (turned * np.sqrt(self._tokens))[:, None], 0.0)
        nothing = np.zeros(mask.shape)
        noises = [self._noise_of(wide, noise), nothing]
        return self._gradients(update, self._scorer, [wide, nothing], noises)

    def _total(self, sums: Pair, reference: Pair, z: float, doubts: Array) -> Array:
        """The loss of the step from the sums of its answers."""

        def answers(which: Flags) -> Answers:
            both, of_reference = sums.at(which), reference.at(which)
            tokens = self._tokens[which]
            return Answers(both.own, of_reference.own, tokens, both.run, of_reference.run)

        pairs = Pairs(
            answers(self._is_good),
            answers(~self._is_good),
            self._mean_tokens,
            z,
            float(doubts.max(initial=0.0)),
        )
        config = self.step.config
        weights = config.preference_weights or (1.0,) * len(self._losses)
        given, total = config.preference_args or {}, np.zeros(())
        for loss, weight in zip(self._losses, weights, strict=True):
            options = {n: float(given.get(n, value)) for n, value in loss.defaults.items()}
            values = loss.function(pairs, options)
            number = len(self._tokens) if loss.of_answers else config.train_batch_size
            total = total + weight * values.sum() / number
        return total

    def _reference(self, update: Update, doubts: Array) -> Pair:
        """Sums under the reference, of run and own; 0 where no loss reads them."""
        step, found, seen = self.step, self.step.found, self.step.record.values.ref_logprobs
        is_wanted = np.array([any(loss.has_reference for loss in self._losses)])
        found.exact("has a reference", np.array([seen.size > 0]), is_wanted)
        nothing = np.zeros(len(doubts))
        if not seen.size or not is_wanted.all():
            return Pair(nothing, nothing)
        self._scorer.load(self._reference_state())
        own = self._scorer.score(step.rows.ids, update.mask)[0].sum(axis=1)
        run = step.rows.padded(seen).sum(axis=1)
        everywhere = np.ones((len(own), 1), dtype=np.bool_)
        found.tokens(
            "sums of the reference",
            run[:, None],
            own[:, None],
            everywhere,
            "logprobs",
            floor=lambda: doubts[:, None],
        )
        return Pair(own, run)

    def _reference_state(self) -> dict[str, Tensor]:
        return frozen_state(self._folder)

    def _check_z(self, update: Update) -> float:
        """The mean log-ratio of answers behind other prompts, at least 0; 0 where nobody asks."""
        if not any("desirable_weight" in loss.defaults for loss in self._losses):
            return 0.0
        ids, mask = self._others()
        if not len(ids):
            own, moved = np.zeros(1), 0.0
        else:
            sums = []
            for state in (self._optimizers["actor"].weights, self._reference_state()):
                self._scorer.load(state)
                sums.append(self._scorer.score(ids, mask)[0])
            own = (sums[0] - sums[1]).sum(axis=1)
            error = np.where(mask, self.step.rounding(sums[0], "logprobs"), 0.0)
            moved = 6 * float(np.sqrt((error**2).sum())) / len(own)
        z, size = max(0.0, float(own.mean())), float(np.abs(own).mean())
        seen = update.facts.losses.get("kl", float("nan"))
        name = f"log-ratio behind other prompts, {update.name}"
        self.step.found.number(name, seen, z, "loss", scale=size, floor=moved)
        return z

    def _others(self) -> tuple[Integers, Flags]:
        """The answers of the next item with another prompt behind the prompt of each item."""
        rows, items = self.step.rows, items_of(self.step)
        starts = rows.mask.argmax(axis=1)
        texts = [tuple(rows.ids[row, :start]) for row, start in enumerate(starts)]
        number, found = items[-1] + 1, []
        for item in range(number):
            prompt = texts[items.index(item)]
            turn = [(item + n) % number for n in range(1, number)]
            behind = [n for n in turn if texts[items.index(n)] != prompt][:1]
            for row in (row for row, own in enumerate(items) if own in behind):
                part = slice(starts[row], rows.lengths[row])
                trained = [False] * len(prompt) + rows.mask[row, part].tolist()
                found.append(([*prompt, *rows.ids[row, part].tolist()], trained))
        width = max((len(ids) for ids, _ in found), default=0)
        ids, mask = np.zeros((len(found), width), np.int64), np.zeros((len(found), width), np.bool_)
        for row, (own, trained) in enumerate(found):
            ids[row, : len(own)], mask[row, : len(own)] = own, trained
        return ids, mask


def _single(value: float, mask: Flags) -> Term:
    """A loss that belongs to no single token."""
    values = np.zeros(mask.shape)
    values[0, 0] = value
    return Term(values, np.zeros(mask.shape))


def preference_audit(config: TrainConfig, reference: Path | None) -> StageAudit:
    """The audit of a stage; see `stage_named` of `lightrft.tools.audit.report`."""

    def updates(step: Step, is_configured: bool) -> Updates:
        return PreferenceUpdates(step, trained_model(step), reference, is_configured=is_configured)

    config = in_items(config)
    build = partial(build_policy, config)
    return StageAudit(config, build, lambda s: check_given(s, check_answers(s)), updates)
