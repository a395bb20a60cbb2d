"""Optimizer steps of a step: losses, gradients, learning rates, updated weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrft.config.options import Arguments
from lightrft.tools.audit.findings import norm_of
from lightrft.tools.audit.models import Scorer
from lightrft.tools.audit.optimizers import (
    ADAM,
    DECOUPLED,
    KNOWN,
    Optimizer,
    as_double,
    clip_factor,
    configured_groups,
    learning_rate,
    stored_groups,
)
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.record import RecordError, UpdateFacts, named
from lightrft.tools.audit.replay import NO_PASS, ReplayedStep
from lightrft.tools.audit.samples import padded
from lightrft.tools.audit.tolerances import NOISE_OF_GRADIENTS, NOISE_SAFETY

# Share of Adam's unit steps by which rounding moves an entry.
ADAM_NOISE = 2e-3
# Rounding of a recorded score.
FLOAT32 = 2.0**-23
# Rounding of a stored float32 weight: half a unit in the last place.
ROUNDING = 2.0**-24
# A gradient of this norm is 0 but for the rounding of float64.
ZERO = 1e-9
# Rounding of an entry of a gradient, relative to the largest one.
DOUBT = 2e-6


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of a model.

    Args:
        facts: Recorded facts.
        name: Name in the findings.
        micros: Rows of each micro batch.
        mask: Tokens of the batch: [rows, seq] bool.
        new, weights: Recorded scores and factors of the tokens: [rows, seq]; None without.
        state: Weights of the model before the update.
    """

    facts: UpdateFacts
    name: str
    micros: list[list[int]]
    mask: Tensor
    new: Tensor | None
    weights: Tensor | None
    state: Mapping[str, Tensor]


# Terms of a loss by their names in the record: weight, and one value per token or item.
Terms = Mapping[str, tuple[float, Tensor]]


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss of one model in one draw, replayed from the record.

    Args:
        scorer: Plain model; None if its forward pass cannot be repeated.
        scores: Scores that a run records of each update; "" without.
        denominator: Function that returns Z of an update on the tokens of a mask.
        terms: Function that returns the terms of an update by the model's outputs, whose first are
            the scores.
        ended: Reason why its updates cannot be recomputed; "" if they can.
    """

    scorer: Scorer | None
    scores: str
    denominator: Callable[[Tensor], float]
    terms: Callable[[Update, Sequence[Pair]], Terms]
    ended: str = ""


# Losses by model in a draw.
Objectives = Callable[[Draw], Mapping[str, Objective]]


def differentiated(
    terms: Callable[[Sequence[Pair]], Terms], outputs: Sequence[Pair]
) -> tuple[Terms, tuple[Tensor, ...]]:
    """Return the terms of a loss, and its derivatives by each output."""
    leaves = [Pair(each.exact.detach().requires_grad_(), each.run) for each in outputs]
    parts = terms(leaves)
    total = torch.stack([weight * values.sum() for weight, values in parts.values()]).sum()
    by_output = [leaf.exact for leaf in leaves]
    slopes = torch.autograd.grad(total, by_output, materialize_grads=True)
    return {name: (weight, value.detach()) for name, (weight, value) in parts.items()}, slopes


class Updates:
    """Replay of the optimizer steps of a model in one draw.

    Args:
        step: Step under audit.
        model: Name of the model.
        objective: Loss of the model.
        draw: Signs of rounding errors.
        is_configured: True if the options determine its optimizer.
    """

    def __init__(
        self,
        step: ReplayedStep,
        model: str,
        objective: Objective,
        draw: Draw,
        *,
        is_configured: bool,
    ) -> None:
        self.step, self._model, self._objective, self._draw = step, model, objective, draw
        self._is_configured, self._facts = is_configured, step.record.facts.optimizers[model]
        self._optimizer = self._open()
        self._count, self._rates = 0, 0.0
        # Relative error of the first gradient in bfloat16.
        self._rounded = math.inf
        # Reason why the updates cannot be recomputed.
        self._ended = unrecomputable(step, model) or objective.ended

    def _open(self) -> Optimizer:
        state, config = as_double(self.step.states[self._model]), self.step.config
        weights = named(state, "weight", "master")
        moments = {n: v for n, v in state.items() if not n.startswith("weight/")}
        names = set(self.step.trained_names(self._model))
        if self._is_configured:
            groups = configured_groups(names, weights, config)
            return Optimizer(DECOUPLED[0], weights, groups, moments)
        # An optimizer of the caller may also hold weights without gradients.
        stored = stored_groups(self._facts)
        groups = {name: stored[name] for name in weights if name in names & stored.keys()}
        return Optimizer(self._facts.kind, weights, groups, moments)

    def carry_out(self, number: int, facts: UpdateFacts) -> None:
        """Replay the next update of the model, the step's `number`-th."""
        if not self._ended:
            update, scorer = self._open_update(number, facts), self._objective.scorer
            slopes = self._check_losses(update, self._check_scores(update, scorer))
            if slopes and self.step.is_rounded:
                # The error of the backward pass is measured; scores are off by their mean distance.
                exact = self._draw.repeated(slopes[0])
                slopes = (exact + (slopes[0] - exact) / NOISE_SAFETY, *slopes[1:])
            if scorer is not None:
                self._act(update, self._gradient(update, scorer, slopes))
            else:
                self.step.results.skip(f"gradient norm, {update.name}", NO_PASS)
                if not facts.is_skipped:
                    self._rate(update)
        self._count += 1

    def _open_update(self, number: int, facts: UpdateFacts) -> Update:
        """Return an update with its recorded values, and check its denominator."""
        step, rows = self.step, self.step.rows
        name, micros = f"{self._model} update {self._count + 1}", step.micro_rows(facts)
        batch = [row for micro in micros for row in micro]

        def recorded(what: str) -> Tensor | None:
            flat = step.record.update_values.get(f"{number}/{what}")
            if flat is None:
                return None
            values = torch.zeros(rows.ids.shape, dtype=torch.float64)
            values[batch] = padded(flat, rows.is_token[batch])
            return values

        mask = torch.zeros_like(rows.mask)
        mask[batch] = rows.mask[batch]
        z = self._objective.denominator(mask)
        step.results.number(f"denominator, {name}", facts.normalizer, z)
        new, weights = recorded("new"), recorded("weights")
        if new is not None and self._model == "critic":
            # Outside of responses a critic's values are meaningless.
            new = torch.where(mask, new, 0.0)
        return Update(facts, name, micros, mask, new, weights, dict(self._optimizer.weights))

    def _check_scores(self, update: Update, scorer: Scorer | None) -> list[Pair]:
        """Compare scores by an update's weights; return the outputs with errors of the draw.

        Without a forward pass the scores are the run's, if they are recorded.
        """
        findings, mask, what = self.step.results, update.mask, self._objective.scores
        if scorer is None:
            if update.new is None:
                return []
            seen = torch.where(mask, update.new, 0.0)
            error = torch.where(mask, FLOAT32 * (-seen).clamp(min=1.0), 0.0)
            return [self._draw.move(Pair(seen, seen), error)]
        scorer.load(update.state)
        first, *others = scorer.score(self.step.rows.ids, mask)
        scores = Pair(first, first if update.new is None else update.new)
        kind, hint = "logprobs", ""
        if self._count:
            kind = "replayed"
            hint = f"; look at the gradient and the optimizer in update {self._count}"
        if what:
            name = f"{what}, {update.name}"
            findings.tokens(name, scores, mask, kind, hint=hint)
        error = torch.where(mask, self.step.rounding(first, kind), 0.0)
        return [self._draw.move(scores, error), *(Pair(each, each) for each in others)]

    def _check_losses(self, update: Update, outputs: Sequence[Pair]) -> Sequence[Tensor]:
        """Compare the terms of a loss; return its derivatives."""
        findings = self.step.results
        if not outputs:
            findings.skip(f"losses, {update.name}", "its scores are not recorded")
            return ()
        terms, slopes = differentiated(partial(self._objective.terms, update), outputs)
        for name, (_, values) in terms.items():
            run = update.facts.losses.get(name, math.nan)
            findings.number(f"{name} loss, {update.name}", run, values, "loss")
        return slopes

    def _gradient(
        self, update: Update, scorer: Scorer, slopes: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradient of the trained weights; measure the rounding of a first one."""

        def by(model: Scorer) -> dict[str, Tensor]:
            model.load(update.state)
            gradients = model.slopes(self.step.rows.ids, update.mask, slopes)
            return {n: value for n, value in gradients.items() if n in self._optimizer.groups}

        exact = by(scorer)
        if self.step.is_rounded and not self._count and not self._draw.number:
            rounded = by(scorer.in_bfloat16())
            difference = norm_of(rounded[n] - value for n, value in exact.items())
            self._rounded = difference / max(norm_of(exact.values()), 1e-300)
        return exact

    def _act(self, update: Update, gradient: Mapping[str, Tensor]) -> None:
        """Clip a gradient and take the optimizer's step."""
        findings, facts = self.step.results, update.facts
        draw, optimizer = self._draw, self._optimizer
        norm, name = norm_of(gradient.values()), f"gradient norm, {update.name}"
        if facts.is_skipped:
            note = "the run skipped this update: its gradients were not finite"
            findings.add(name, facts.grad_norm, norm, math.inf, 0.0, note)
            return
        most = math.inf if self._count else NOISE_OF_GRADIENTS * self._rounded
        findings.number(name, facts.grad_norm, norm, "norm", most=most)
        is_zero = draw.repeated(torch.tensor(norm < ZERO and not optimizer.moments))
        if is_zero and optimizer.kind in ADAM:
            self._ended = f"the gradient of {update.name} is rounding: Adam steps by its sign"
            return
        rate, factor = self._rate(update), clip_factor(norm, self.step.config.max_norm)
        self._rates += rate
        largest = max((float(value.abs().max()) for value in gradient.values()), default=0.0)
        for weight, slope in gradient.items():
            if draw.number:
                # An entry that is 0 by its formula has no error.
                slope = slope + draw.signed(DOUBT * largest * (slope != 0))
            optimizer.step(weight, factor * slope, rate)
            if draw.number:
                exact = optimizer.weights[weight]
                optimizer.weights[weight] = exact + draw.sign * (exact.float() - exact)

    def _rate(self, update: Update) -> float:
        config, model, seen = self.step.config, self._model, update.facts.learning_rate
        facts, name = self._facts, f"learning rate, {update.name}"
        if not self._is_configured or facts.schedule_steps <= 0:
            self.step.results.skip(name, "of an optimizer or schedule of the caller's own")
            return seen
        peak = config.peak_learning_rate if model == "actor" else config.critic_learning_rate
        decided = self.step.decided
        count, steps = decided.counts[model], decided.schedule_steps[model]
        position = (facts.schedule_position if count is None else count) + self._count
        rate = learning_rate(peak, position, steps or facts.schedule_steps, facts, config)
        floor = self.step.results.tolerances["sum"] * 1e-6 * peak
        self.step.results.number(name, seen, rate, floor=floor)
        return rate

    def compare_after(self) -> None:
        """Compare the states after the last update."""
        findings, model, optimizer = self.step.results, self._model, self._optimizer
        reason = self._ended or (NO_PASS if self.step.policy is None else "")
        after = as_double(self.step.record.state("after", model))
        start = named(as_double(self.step.states[model]), "weight", "master")
        weights = named(after, "weight", "master")
        if reason:
            findings.skip(f"{model} weights after", reason)
        else:
            self._compare_moments(after)
            decays = self._is_configured and optimizer.kind in ADAM and self._rates > 0
            kinds = (("weights", "matrices", self.step.config.l2), ("vectors", "vectors", 0.0))
            for name, what, decay in kinds:
                trained = {
                    n: start[n]
                    for n in optimizer.groups
                    if (start[n].dim() >= 2) == (name == "weights")
                }
                if decays:
                    self._check_decay(what, decay, trained, weights)
                findings.states(
                    f"{model} {name} after (change)",
                    {n: weights[n] - value for n, value in trained.items()},
                    {n: optimizer.weights[n] - value for n, value in trained.items()},
                    findings.tolerances["adam" if optimizer.kind in ADAM else "sgd"],
                    ROUNDING * self._count * norm_of(trained.values()),
                )
        if self._ended:
            return
        frozen = start.keys() & weights.keys() - optimizer.groups.keys()
        moved = sorted(n for n in frozen if not torch.equal(weights[n], start[n]))
        note = f"such as {moved[0]}" if moved else ""
        findings.add(f"{model} frozen weights after", len(moved), 0.0, len(moved), 0.0, note)

    def _check_decay(
        self, what: str, wanted: float, start: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        """Compare decay: the weights' coefficient in the run's change minus the recomputed one.

        At small rates the norm of the change does not show it; summed over all entries, it does.
        """
        findings = self.step.results
        before, run, expected = (
            torch.cat([torch.zeros(0), *(state[n].flatten() for n in start)])
            for state in (start, weights, self._optimizer.weights)
        )
        size, beyond = float(before @ before), run - expected
        if size == 0:
            return
        overlap = float(beyond @ before)
        seen = wanted - overlap / (size * self._rates)
        # Rounding of Adam's unit steps and of weights, averaged over all entries.
        noise = math.sqrt(len(before) / size) * ADAM_NOISE
        noise += 3 * ROUNDING * self._count / self._rates
        limit = findings.tolerances["decay"] * (wanted + noise)
        # Equal entries, such as those of new norms, are all rounded to the same side.
        rounded = float((expected.float() - expected) @ before)
        limit += 2 * self._count * abs(rounded) / (size * self._rates)
        name = f"{self._model} weight decay of {what}"
        # Other errors of the update move weights mostly in other directions.
        is_other = overlap**2 < 0.5 * size * float(beyond @ beyond)
        if abs(seen - wanted) > limit and is_other:
            findings.skip(name, "its share is below the noise of Adam's first step")
        else:
            findings.add(name, seen, wanted, abs(seen - wanted), limit)

    def _compare_moments(self, after: Mapping[str, Tensor]) -> None:
        findings = self.step.results
        share = min(findings.tolerances["moments"], NOISE_OF_GRADIENTS * self._rounded)
        # A square has twice the relative error of its root.
        shares = {"exp_avg": share, "exp_avg_sq": 2 * share, "step": 0.0, "momentum_buffer": share}
        for key, limit in shares.items():
            moments, seen = named(self._optimizer.moments, key), named(after, key)
            name = f"{self._model} {key} after"
            if not moments or not self._count:
                continue
            if moments.keys() - seen.keys():
                findings.skip(name, "not recorded")
            else:
                findings.states(name, seen, moments, limit)


def trained_model(step: ReplayedStep) -> Scorer:
    """Return the plain model of the trained model.

    Raises:
        RecordError: The model reads images.
    """
    if step.policy is None:
        raise RecordError(f"{step.record.folder}: a model of images is not trained on given rows")
    return step.policy


def with_options(loss: Callable[..., Tensor], options: Arguments) -> Callable[..., Tensor]:
    """Return a loss with those hyper-parameters among the options that it has."""
    known = inspect.signature(loss).parameters
    chosen = {n: float(v) for n, v in (options or {}).items() if n in known}
    return partial(loss, **chosen)


def unrecomputable(step: ReplayedStep, model: str) -> str:
    """Return why a model's gradients depend on unrecorded values; "" if they do not."""
    config, kind = step.config, step.record.facts.optimizers[model].kind
    if model == "actor" and config.aux_loss_coef > 0:
        return "the balance of experts is not recomputed"
    drops = config.lora_rank > 0 and config.lora_dropout > 0 and not step.is_reinforced
    if model == "actor" and drops:
        return "dropout is random"
    return "" if kind in KNOWN else f"optimizer {kind} is the caller's own"


def replay(
    step: ReplayedStep, objectives: Mapping[str, Objective], draw: Draw, *, is_configured: bool
) -> None:
    """Replay all updates of a step in order, then compare the states after them.

    Args:
        step: Step under audit.
        objectives: Losses by model.
        draw: Signs of rounding errors.
        is_configured: True if the options determine the optimizers.
    """
    facts = step.record.facts
    models = {
        name: Updates(step, name, objectives[name], draw, is_configured=is_configured)
        for name in facts.optimizers
    }
    for number, update in enumerate(facts.updates):
        models[update.model].carry_out(number, update)
    for each in models.values():
        each.compare_after()
