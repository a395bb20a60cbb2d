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
    norm_of,
    stored_groups,
)
from lightrft.tools.audit.pairs import NUM_DRAWS, Draw, Pair, draws, rounding_of, signed
from lightrft.tools.audit.record import RecordError, UpdateFacts, named
from lightrft.tools.audit.replay import NO_PASS, ReplayedStep
from lightrft.tools.audit.samples import padded
from lightrft.tools.audit.tolerances import NOISE_OF_GRADIENTS, NOISE_SAFETY

# Rounding of a recorded score.
FLOAT32 = 2.0**-23
# Rounding of a stored float32 weight: half a unit in the last place.
ROUNDING = 2.0**-24
# Adam normalises gradients: below this share of the largest one they are rounding.
MIN_MOMENT = 1e-5
# Rounding of an entry of a gradient, relative to the largest one.
DOUBT = 2e-6
# Factor of the largest movement of scores by errors of weights.
SAFETY = 3


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
# Terms by the outputs of a model, with the errors of a draw; the first output are the scores.
Formula = Callable[[Sequence[Pair], Draw], Terms]


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss of one model, replayed from the record.

    Args:
        scorer: Plain model; None if its forward pass cannot be repeated.
        scores: Scores that a run records of each update; "" without.
        denominator: Function that returns Z of an update on the tokens of a mask.
        formula: Function that compares the inputs of an update, and returns its loss; it gets the
            scores by the model's weights, and the rounding of each.
        ended: Reason why its updates cannot be recomputed; "" if they can.
    """

    scorer: Scorer | None
    scores: str
    denominator: Callable[[Tensor], float]
    formula: Callable[[Update, Pair, Tensor], Formula]
    ended: str = ""


def differentiated(
    formula: Formula, outputs: Sequence[Pair], error: Tensor, draw: Draw
) -> tuple[Terms, tuple[Tensor, ...]]:
    """Return the terms of a loss, and its derivatives by each output."""
    moved = [draw.move(outputs[0], error), *outputs[1:]]
    leaves = [Pair(each.exact.detach().requires_grad_(), each.run) for each in moved]
    terms = formula(leaves, draw)
    total = torch.stack([weight * values.sum() for weight, values in terms.values()]).sum()
    by_output = [leaf.exact for leaf in leaves]
    slopes = torch.autograd.grad(total, by_output, materialize_grads=True)
    return {name: (weight, value.detach()) for name, (weight, value) in terms.items()}, slopes


class Updates:
    """Replay of the optimizer steps of a model.

    Args:
        step: Step under audit.
        model: Name of the model.
        objective: Loss of the model.
        is_configured: True if the options determine its optimizer.
    """

    def __init__(
        self, step: ReplayedStep, model: str, objective: Objective, *, is_configured: bool
    ) -> None:
        self.step, self._model, self._objective = step, model, objective
        self._is_configured, self._facts = is_configured, step.record.facts.optimizers[model]
        self._optimizer = self._open()
        self._count, self._rates = 0, 0.0
        # Sums over the updates: rounding of gradients, and SGD's movement by it.
        self._noise = self._moved = 0.0
        # Relative error of the first gradient in bfloat16.
        self._rounded = math.inf
        # Possible error of each weight, since Adam normalises gradients.
        self._spread: dict[str, Tensor] = {}
        # Reason why the updates cannot be recomputed.
        self._ended = unrecomputable(step, model) or objective.ended

    def _open(self) -> Optimizer:
        state, config = as_double(self.step.states[self._model]), self.step.config
        weights = named(state, "weight", "master")
        moments = {n: v for n, v in state.items() if not n.startswith("weight/")}
        names = [name for name in self.step.trained_names(self._model) if name in weights]
        if self._is_configured:
            groups = configured_groups(names, weights, config)
            return Optimizer(DECOUPLED[0], weights, groups, moments)
        # An optimizer of the caller may also hold weights without gradients.
        stored = stored_groups(self._facts)
        groups = {name: stored[name] for name in names if name in stored}
        return Optimizer(self._facts.kind, weights, groups, moments)

    def carry_out(self, number: int, facts: UpdateFacts) -> None:
        """Replay the next update of the model, the step's `number`-th."""
        if not self._ended:
            update, scorer = self._open_update(number, facts), self._objective.scorer
            if scorer is None:
                self._follow(update)
            else:
                self._carry_out(update, scorer)
        self._count += 1

    def _carry_out(self, update: Update, scorer: Scorer) -> None:
        """Compare an update, and take its step."""
        step = self.step
        scorer.load(update.state)
        first, *others = scorer.score(step.rows.ids, update.mask)
        scores = Pair(first, first if update.new is None else update.new)
        error = self._check_scores(update, scores, scorer)
        outputs = [scores, *(Pair(each, each) for each in others)]
        slopes, moved = self._check_losses(update, outputs, error)

        def gradient(by_output: Sequence[Tensor], of: Scorer) -> dict[str, Tensor]:
            of.load(update.state)
            gradients = of.slopes(step.rows.ids, update.mask, by_output)
            return {n: value for n, value in gradients.items() if n in self._optimizer.groups}

        def rounding() -> dict[str, Tensor]:
            draw = Draw(1, step.borders)
            drawn = [
                a + draw.signed(step.unit * b.abs()) for a, b in zip(moved, slopes, strict=True)
            ]
            if step.is_rounded:
                # The error of the backward pass is measured; scores are off by their mean distance.
                drawn[0] = moved[0] / NOISE_SAFETY
            return gradient(drawn, scorer)

        exact = gradient(slopes, scorer)
        if step.is_rounded and not self._count:
            rounded = gradient(slopes, scorer.in_bfloat16())
            difference = norm_of(rounded[n] - value for n, value in exact.items())
            self._rounded = difference / max(norm_of(exact.values()), 1e-300)
        self._act(update, exact, rounding)

    def _follow(self, update: Update) -> None:
        """Compare what needs no forward pass: losses of the run's scores, and the learning rate."""
        findings = self.step.results
        if update.new is None:
            findings.skip(f"losses, {update.name}", "its scores are not recorded")
        else:
            seen = torch.where(update.mask, update.new, 0.0)
            error = torch.where(update.mask, FLOAT32 * (-seen).clamp(min=1.0), 0.0)
            self._check_losses(update, [Pair(seen, seen)], error)
        findings.skip(f"gradient norm, {update.name}", NO_PASS)
        if not update.facts.is_skipped:
            self._rate(update)

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

    def _check_scores(self, update: Update, scores: Pair, scorer: Scorer) -> Tensor:
        """Compare scores by an update's weights; return the rounding of each."""
        drift, mask, before = torch.zeros_like(scores.exact), update.mask, self._count
        kind, what = "replayed" if before else "logprobs", self._objective.scores

        def floor() -> Tensor:
            # Scores move almost in proportion: opposite signs would tell the same again.
            random = torch.Generator().manual_seed(0)
            for _ in range(NUM_DRAWS if self._spread else 0):
                moved = {n: update.state[n] + signed(v, random) for n, v in self._spread.items()}
                scorer.load({**update.state, **moved})
                other = scorer.score(self.step.rows.ids, mask)[0]
                torch.maximum(drift, (other - scores.exact).abs(), out=drift)
            return SAFETY * drift

        if what:
            name = f"{what}, {update.name}"
            self.step.results.tokens(name, scores.run, scores.exact, mask, kind, floor=floor)
            if before:
                self.step.results.hint(f"look at the gradient and the optimizer in update {before}")
        return torch.where(mask, self.step.rounding(scores.exact, kind) + SAFETY * drift, 0.0)

    def _check_losses(
        self, update: Update, outputs: Sequence[Pair], error: Tensor
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Compare the terms of a loss; return its derivatives, and their change by rounding."""
        formula = self._objective.formula(update, outputs[0], error)
        results = [
            differentiated(formula, outputs, error, draw) for draw in draws(self.step.borders)
        ]
        terms, slopes = results[0]
        for name, (_, values) in terms.items():
            self.step.results.number(
                f"{name} loss, {update.name}",
                update.facts.losses.get(name, math.nan),
                float(values.sum()),
                "loss",
                scale=float(values.abs().sum()),
                floor=float(rounding_of([other[name][1] for other, _ in results]).sum()),
            )
        by_output = zip(*(others for _, others in results), strict=True)
        # The largest change of each, with the signs of one draw: tokens of a row may share theirs.
        return slopes, [rounding_of(each).copysign(each[1] - each[0]) for each in by_output]

    def _act(
        self,
        update: Update,
        exact: Mapping[str, Tensor],
        rounding: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Clip a gradient and take the optimizer's step; compute rounding only if needed."""
        findings, facts = self.step.results, update.facts
        optimizer, noise = self._optimizer, 0.0
        norm, name = norm_of(exact.values()), f"gradient norm, {update.name}"
        if facts.is_skipped:
            note = "the run skipped this update: its gradients were not finite"
            findings.add(name, facts.grad_norm, norm, math.inf, 0.0, note)
            return
        share, difference = findings.tolerances["norm"], abs(facts.grad_norm - norm)
        # Run another backward pass only where rounding may explain the difference.
        if not difference <= share * norm / 10:
            noise = 3 * norm_of(rounding().values())
        if not self._count:
            share = min(share, NOISE_OF_GRADIENTS * self._rounded)
        findings.add(name, facts.grad_norm, norm, difference, share * norm + noise)
        if optimizer.kind in ADAM and norm <= noise and not optimizer.moments:
            self._ended = f"the gradient of {update.name} is rounding: Adam steps by its sign"
            return
        rate, factor = self._rate(update), clip_factor(norm, self.step.config.max_norm)
        largest = max((float(value.abs().max()) for value in exact.values()), default=0.0)
        doubt = factor * max(DOUBT * largest, self._each(noise))
        for value in exact.values():
            value *= factor
        for n, size in optimizer.spread(exact, rate, doubt).items():
            self._spread[n] = self._spread.get(n, 0) + size
        optimizer.step(exact, rate)
        self._rates += rate
        self._noise += noise * factor
        self._moved += rate * self._noise

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
        reason = self._ended or (NO_PASS if self.step.policy is None else "")
        after = as_double(self.step.record.state("after", self._model))
        start = named(as_double(self.step.states[self._model]), "weight", "master")
        weights = named(after, "weight", "master")
        if reason:
            self.step.results.skip(f"{self._model} weights after", reason)
        else:
            self._compare_moments(after)
            self._compare_weights(weights, start)
        if self._ended:
            return
        frozen = start.keys() & weights.keys() - self._optimizer.groups.keys()
        moved = sorted(n for n in frozen if not torch.equal(weights[n], start[n]))
        note = f"such as {moved[0]}" if moved else ""
        name = f"{self._model} frozen weights after"
        self.step.results.add(name, len(moved), 0.0, len(moved), 0.0, note)

    def _compare_weights(self, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        """Compare weight decay, and the change of the weights."""
        findings, optimizer = self.step.results, self._optimizer
        counted, is_adam = self._counted(), optimizer.kind in ADAM

        def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
            return norm_of((one[n] - other[n]) * counted.get(n, 1) for n in optimizer.groups)

        if is_adam and self._is_configured and self._rates > 0:
            self._check_decay(weights, start)
        change = distance(optimizer.weights, start)
        limit = findings.tolerances["adam" if is_adam else "sgd"] * change
        limit += 0.0 if is_adam else self._moved
        limit += ROUNDING * self._count * norm_of(start[n] for n in optimizer.groups)
        findings.add(
            f"{self._model} weights after (change)",
            distance(weights, start),
            change,
            distance(weights, optimizer.weights),
            limit,
        )

    def _compare_moments(self, after: Mapping[str, Tensor]) -> None:
        findings, noise = self.step.results, self._noise
        share = min(findings.tolerances["moments"], NOISE_OF_GRADIENTS * self._rounded)
        betas = [group.betas[0] for group in self._optimizer.groups.values()]
        # Share of the size, and floor; a square has twice the relative error of its root.
        limits = {
            "exp_avg": (share, (1 - min(betas, default=0.0)) * noise),
            "exp_avg_sq": (2 * share, noise**2),
            "step": (0.0, 0.0),
            "momentum_buffer": (share, noise),
        }
        for key, (weight, floor) in limits.items():
            moments, seen = named(self._optimizer.moments, key), named(after, key)
            if not moments or not self._count:
                continue
            if moments.keys() - seen.keys():
                findings.skip(f"{self._model} {key} after", "not recorded")
                continue
            size, run = norm_of(moments.values()), norm_of(seen[n] for n in moments)
            difference = norm_of(seen[n] - value for n, value in moments.items())
            findings.add(f"{self._model} {key} after", run, size, difference, weight * size + floor)

    def _check_decay(self, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        """Compare decay: the weights' coefficient in the run's change minus the recomputed one."""
        optimizer, config, findings = self._optimizer, self.step.config, self.step.results
        for what, wanted, is_matrix in (("matrices", config.l2, True), ("vectors", 0.0, False)):
            names = [n for n in optimizer.groups if (start[n].dim() >= 2) == is_matrix]
            size = norm_of(start[n] for n in names) ** 2
            if size == 0:
                continue

            beyond = {n: weights[n] - optimizer.weights[n] for n in names}
            overlap = _product(beyond, start)
            seen = wanted - overlap / (size * self._rates)
            count = math.sqrt(sum(start[n].numel() for n in names))
            # Rounding of Adam's unit steps and of weights, averaged over all entries.
            noise = count / math.sqrt(size) * findings.tolerances["adam"]
            noise += 3 * ROUNDING * self._count / self._rates
            limit = findings.tolerances["decay"] * (wanted + noise)
            # Equal entries, such as those of new norms, are all rounded to the same side.
            rounded = {n: optimizer.weights[n].float() - optimizer.weights[n] for n in names}
            alike = _product(rounded, start)
            limit += 2 * self._count * abs(alike) / (size * self._rates)
            name = f"{self._model} weight decay of {what}"
            # Other errors of the update move weights mostly in other directions.
            is_other = overlap**2 < 0.5 * size * norm_of(beyond.values()) ** 2
            if abs(seen - wanted) > limit and is_other:
                findings.skip(name, "its share is below the noise of Adam's first step")
            else:
                findings.add(name, seen, wanted, abs(seen - wanted), limit)

    def _each(self, noise: float) -> float:
        """Return the share of one gradient entry in a rounding norm."""
        optimizer = self._optimizer
        return 10 * noise / math.sqrt(sum(optimizer.weights[n].numel() for n in optimizer.groups))

    def _counted(self) -> dict[str, Tensor]:
        """Return entries whose gradient exceeds rounding; Adam takes unit steps for any."""
        optimizer = self._optimizer
        if optimizer.kind not in ADAM:
            return {}
        second = named(optimizer.moments, "exp_avg_sq")
        largest = max((float(v.max()) for v in second.values()), default=0.0)
        share = 1 - max(group.betas[1] for group in optimizer.groups.values())
        bound = max(largest * MIN_MOMENT**2, share * self._each(self._noise) ** 2)
        return {n: (v > bound).double() for n, v in second.items()}


def _product(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the sum of products over the parameters of the first."""
    return sum(float((value * other[n]).sum()) for n, value in one.items())


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


def replay(step: ReplayedStep, objectives: Mapping[str, Objective], *, is_configured: bool) -> None:
    """Replay all updates of a step in order, then compare the states after them.

    Args:
        step: Step under audit.
        objectives: Losses by model.
        is_configured: True if the options determine the optimizers.
    """
    facts = step.record.facts
    models = {
        name: Updates(step, name, objectives[name], is_configured=is_configured)
        for name in facts.optimizers
    }
    for number, update in enumerate(facts.updates):
        models[update.model].carry_out(number, update)
    for each in models.values():
        each.compare_after()
