"""The optimizer steps of a step: losses, gradients, learning rates, updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightrft.tools.audit.corrections import Borders, Pair
from lightrft.tools.audit.losses import (
    POLICY_LOSSES,
    Batch,
    Term,
    kl_term,
    normalizer,
    token_shares,
    value_term,
)
from lightrft.tools.audit.optimizers import (
    ADAM,
    KNOWN,
    Optimizer,
    clip_factor,
    configured_groups,
    given_groups,
    learning_rate,
    norm_of,
)
from lightrft.tools.audit.record import Array, Flags, UpdateFacts
from lightrft.tools.audit.replay import (
    Numbers,
    Step,
    as_double,
    policy_options,
    relative_norm,
    token_weights,
    weights_of,
    with_rounding,
)

# Of a float32 weight that is stored: half a unit in the last place.
ROUNDING = 2.0**-24
# Adam divides gradients by their own size: below this share of the largest they are rounding.
MIN_MOMENT = 1e-5
# Rounding of an entry of a gradient, relative to the largest one.
DOUBT = 2e-6
# So often signs of roundings are drawn, and so many times the largest movement is taken.
DRAWS, SAFETY = 4, 3

# A gradient by names, and one of the rounding of each token's part, which is computed if needed.
Slopes = tuple[dict[str, Tensor], Callable[[], dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What updates are computed from.

    Args:
        numbers: Before the first update.
        advantages: Of run and own.
        returns: [rows, seq] that a critic learns.
        error: Rounding of advantages and returns.
        is_configured: The optimizers are those of the options.
    """

    numbers: Numbers
    advantages: Pair
    returns: Array
    error: float
    is_configured: bool


class Updates:
    """Replays the optimizer steps of all models.

    Args:
        step, inputs: What is audited.
    """

    def __init__(self, step: Step, inputs: Inputs) -> None:
        self.step, self.inputs = step, inputs
        self._optimizers = {name: self._open(name) for name in step.record.facts.optimizers}
        self._counts = dict.fromkeys(self._optimizers, 0)
        self._rates = dict.fromkeys(self._optimizers, 0.0)
        # Sums over the updates of a model: rounding of gradients, and of what SGD moves by it.
        self._noise = dict.fromkeys(self._optimizers, 0.0)
        self._moved = dict.fromkeys(self._optimizers, 0.0)
        # How far each weight may be off since Adam divides gradients by their own size.
        self._spread: dict[str, dict[str, Tensor]] = {name: {} for name in self._optimizers}
        self._index = {int(i): row for row, i in enumerate(step.record.samples.sample_ids)}
        # Why the updates of a model cannot be recomputed (any more), by model.
        self._ended: dict[str, str] = {}

    def _open(self, model: str) -> Optimizer:
        facts, step = self.step.record.facts.optimizers[model], self.step
        state = step.states[model]
        weights = as_double(weights_of(state))
        if self.inputs.is_configured:
            groups = configured_groups(facts, weights, step.config)
        else:
            groups = given_groups(facts)
        masters = {n.partition("/")[2]: v for n, v in state.items() if n.startswith("master/")}
        weights |= as_double(masters)
        moments = as_double({n: v for n, v in state.items() if not n.startswith("weight/")})
        return Optimizer(facts.kind, weights, groups, moments)

    def replay(self) -> None:
        """All updates in their order, then the states after them."""
        self._ended |= unrecomputable(self.step)
        for number, update in enumerate(self.step.record.facts.updates):
            is_critic = update.model == "critic"
            if update.model not in self._ended:
                name = f"{update.model} update {self._counts[update.model] + 1}"
                slopes = self._value_slopes if is_critic else self._policy_slopes
                self._act(update, slopes(number, update, name), name)
            self._counts[update.model] += 1
        for model in self._optimizers:
            if model in self._ended:
                self.step.found.skip(f"{model} weights after", self._ended[model])
            else:
                self._compare_after(model)

    def _rows(self, update: UpdateFacts) -> list[list[int]]:
        return [[self._index[i] for i in micro] for micro in update.micro_batches]

    def _new(self, number: int, what: str, micros: list[list[int]]) -> Array | None:
        """Recorded per-token values of an update, [rows, seq]."""
        flat = self.step.record.update_values.get(f"{number}/{what}")
        if flat is None:
            return None
        rows, found, start = self.step.rows, np.zeros(self.step.rows.ids.shape), 0
        for row in (row for micro in micros for row in micro):
            length = int(rows.lengths[row])
            found[row, :length] = flat[start : start + length]
            start += length
        return found

    def _check_normalizer(self, update: UpdateFacts, batch: list[int], name: str) -> float:
        config, mask = self.step.config, self.step.rows.mask[batch]
        z = normalizer(mask, aggregation_of(self.step), config.generate_max_len)
        self.step.found.number(f"denominator, {name}", update.normalizer, z)
        return z

    def _policy_slopes(self, number: int, update: UpdateFacts, name: str) -> Slopes:
        step, numbers, found = self.step, self.inputs.numbers, self.step.found
        config, rows, micros = step.config, step.rows, self._rows(update)
        batch = [row for micro in micros for row in micro]
        mask = np.zeros(rows.mask.shape, dtype=np.bool_)
        mask[batch] = rows.mask[batch]
        weights = token_weights(step, numbers, self.inputs.advantages, batch)
        seen = self._new(number, "weights", micros)
        if weights is not None and seen is not None:
            scale = max(1.0, float(np.abs(weights).max(initial=0)))
            found.tokens(f"token weights, {name}", seen, weights, mask, "weights", scale=scale)
        z = self._check_normalizer(update, batch, name)
        temperature = config.temperature if config.temperature > 0 else 1.0
        state = self._optimizers["actor"].weights
        step.policy.load(state)
        own, entropy = step.policy.score(rows.ids, mask, temperature)
        run = self._new(number, "new", micros)
        new = Pair(own, own if run is None else run)

        def score(state: Mapping[str, Tensor]) -> Array:
            step.policy.load(state)
            return step.policy.score(rows.ids, mask, temperature)[0]

        error = self._check_scores("logprobs", "actor", name, new, mask, score)
        share = token_shares(mask, aggregation_of(step)) / max(z, 1e-300)
        factors = np.ones(mask.shape) if weights is None else weights
        terms = [self._policy_term(micros, new, share * factors, error)]
        self._check_loss("policy", update, name, *terms[0])
        coef, reference = step.record.facts.kl_coef, numbers.reference
        if config.use_kl_loss and coef > 0 and reference is not None:

            def kl_of(scores: Pair, borders: Borders) -> Term:
                kind, old = config.kl_estimator, numbers.old
                return kl_term(kind, scores, reference, old, mask, borders).times(share)

            # Scores and those of the reference are rounded alike.
            pair = with_rounding(kl_of, new, 2 * error, step.borders)
            self._check_loss("kl", update, name, *pair)
            terms.append((pair[0].times(coef), pair[1].times(coef)))
        by_entropy = np.zeros(mask.shape)
        if config.entropy_coef > 0:
            by_entropy = -config.entropy_coef * share
            own_term, moved = Term(entropy, by_entropy), Term(error, by_entropy)
            self._check_loss("entropy", update, name, own_term.times(share), moved.times(share))
        slopes = np.sum([term.slope for term, _ in terms], axis=0)
        noise = np.sum([moved.slope for _, moved in terms], axis=0) + self._unit * np.abs(slopes)

        def gradient(by_logprob: Array, by_entropy: Array) -> dict[str, Tensor]:
            step.policy.load(state)
            return step.policy.slopes(rows.ids, mask, temperature, by_logprob, by_entropy, state)

        return gradient(slopes, by_entropy), lambda: gradient(
            signed(noise), signed(self._unit * by_entropy)
        )

    @property
    def _unit(self) -> float:
        return self.step.found.tolerances["score"]

    def _policy_term(
        self, micros: list[list[int]], new: Pair, weights: Array, error: Array
    ) -> tuple[Term, Term]:
        """The policy loss, and how far it moves by the rounding of scores and advantages."""
        step, old, advantages = self.step, self.inputs.numbers.old, self.inputs.advantages.own
        loss, options = POLICY_LOSSES[step.config.policy_loss_name], policy_options(step.config)

        def of(scores: Pair, borders: Borders, shift: float = 0.0) -> Term:
            term = Term(np.zeros(weights.shape), np.zeros(weights.shape))
            for micro in micros:
                p, q = (Pair(each.own[micro], each.run[micro]) for each in (scores, old))
                mask = step.rows.mask[micro]
                batch = Batch(p, q, advantages[micro] + shift, mask, weights[micro], borders)
                part = loss.term(batch, options)
                term.value[micro], term.slope[micro] = part.value, part.slope
            return term

        term, moved = with_rounding(of, new, error, step.borders)
        shifted = of(new, Borders(step.borders.tolerance), self.inputs.error)
        return term, Term(
            moved.value + np.abs(shifted.value - term.value),
            moved.slope + np.abs(shifted.slope - term.slope),
        )

    def _check_scores(
        self,
        what: str,
        model: str,
        name: str,
        scores: Pair,
        mask: Flags,
        score: Callable[[Mapping[str, Tensor]], Array],
    ) -> Array:
        """Compares scores of an update's weights, and says how far each may be rounded."""
        drift = np.zeros(mask.shape)
        kind = "replayed" if self._counts[model] else "logprobs"

        def floor() -> Array:
            weights, spread = self._optimizers[model].weights, self._spread[model]
            draw = torch.Generator().manual_seed(0)
            for _ in range(DRAWS if spread else 0):
                moved = dict(weights)
                for n, size in spread.items():
                    signs = torch.randint(0, 2, size.shape, generator=draw) * 2 - 1
                    moved[n] = weights[n] + signs * size
                np.maximum(drift, np.abs(score(moved) - scores.own), out=drift)
            return SAFETY * drift

        self.step.found.tokens(
            f"{what}, {name}",
            scores.run,
            scores.own,
            mask,
            kind,
            floor=floor,
        )
        if self._counts[model]:
            before = self._counts[model]
            self.step.found.hint(f"look at the gradient and the optimizer in update {before}")
        return np.where(mask, self.step.rounding(scores.own, kind) + SAFETY * drift, 0.0)

    def _value_slopes(self, number: int, update: UpdateFacts, name: str) -> Slopes:
        step, numbers, critic = self.step, self.inputs.numbers, self.step.critic
        if critic is None or numbers.values is None:
            raise ValueError("the record has updates of a critic, but no critic")
        micros, rows = self._rows(update), step.rows
        batch = [row for micro in micros for row in micro]
        mask = np.zeros(rows.mask.shape, dtype=np.bool_)
        mask[batch] = rows.mask[batch]
        z = self._check_normalizer(update, batch, name)
        state = self._optimizers["critic"].weights
        critic.load(state)
        own = critic.score(rows.ids, mask)
        # Outside of responses a critic's values mean nothing.
        run = self._new(number, "new", micros)
        values = Pair(own, own if run is None else np.where(mask, run, 0.0))

        def score(state: Mapping[str, Tensor]) -> Array:
            critic.load(state)
            return critic.score(rows.ids, mask)

        error = self._check_scores("values", "critic", name, values, mask, score)
        share = token_shares(mask, aggregation_of(step)) / max(z, 1e-300)
        old, clip = numbers.values, step.config.value_clip

        def value_of(scores: Pair, borders: Borders) -> Term:
            returns = self.inputs.returns
            return value_term(scores, old, returns, mask, clip=clip, borders=borders).times(share)

        # What is learned is rounded as the values are.
        term, moved = with_rounding(value_of, values, 2 * error + self.inputs.error, step.borders)
        self._check_loss("value", update, name, term, moved)
        noise = moved.slope + self._unit * np.abs(term.slope)

        def gradient(by_value: Array) -> dict[str, Tensor]:
            critic.load(state)
            return critic.slopes(rows.ids, mask, by_value, state)

        return gradient(term.slope), lambda: gradient(signed(noise))

    def _check_loss(
        self, what: str, update: UpdateFacts, name: str, term: Term, moved: Term
    ) -> None:
        self.step.found.number(
            f"{what} loss, {name}",
            update.losses.get(what, math.nan),
            float(term.value.sum()),
            "loss",
            scale=float(np.abs(term.value).sum()),
            floor=float(moved.value.sum()),
        )

    def _act(self, update: UpdateFacts, slopes: Slopes, name: str) -> None:
        """Clips, and takes the optimizer's step."""
        found, model = self.step.found, update.model
        optimizer = self._optimizers[model]
        own = {n: value for n, value in slopes[0].items() if n in optimizer.groups}
        norm, noise = norm_of(own), 0.0
        if update.is_skipped:
            found.share(
                f"gradient norm, {name}",
                update.grad_norm,
                norm,
                math.inf,
                0.0,
                "the run skipped this update: its gradients were not finite",
            )
            return
        # Another backward pass, which is needed only where rounding may be all there is.
        if not abs(update.grad_norm - norm) <= found.tolerances["norm"] * norm / 10:
            noise = 3 * norm_of({n: v for n, v in slopes[1]().items() if n in optimizer.groups})
        found.number(f"gradient norm, {name}", update.grad_norm, norm, "norm", floor=noise)
        rate, factor = self._rate(update, name), clip_factor(norm, self.step.config.max_norm)
        largest = max((float(value.abs().max()) for value in own.values()), default=0.0)
        doubt = max(DOUBT * largest, self._each(model, noise))
        for n, size in optimizer.spread(own, rate, factor, doubt).items():
            self._spread[model][n] = self._spread[model].get(n, 0) + size
        optimizer.step(own, rate, factor)
        self._rates[model] += rate
        self._noise[model] += noise * factor
        self._moved[model] += rate * self._noise[model]

    def _rate(self, update: UpdateFacts, name: str) -> float:
        config, facts = self.step.config, self.step.record.facts.optimizers[update.model]
        if not self.inputs.is_configured or facts.schedule_steps <= 0:
            self.step.found.skip(
                f"learning rate, {name}", "of an optimizer or schedule of the caller's own"
            )
            return update.learning_rate
        is_actor = update.model == "actor"
        peak = config.actor_learning_rate if is_actor else config.critic_learning_rate
        position = facts.schedule_position + self._counts[update.model]
        rate = learning_rate(peak, position, facts, config)
        floor = self.step.found.tolerances["sum"] * 1e-6 * peak
        self.step.found.number(f"learning rate, {name}", update.learning_rate, rate, floor=floor)
        return rate

    def _compare_after(self, model: str) -> None:
        """Moments, the share of decay, and the change of the weights."""
        found, optimizer = self.step.found, self._optimizers[model]
        after = self.step.record.state("after", model)
        before, weights = self.step.states[model], weights_of(after)
        weights |= {n.partition("/")[2]: v for n, v in after.items() if n.startswith("master/")}
        start = as_double(weights_of(before)) | as_double(
            {n.partition("/")[2]: v for n, v in before.items() if n.startswith("master/")}
        )
        for key in ("exp_avg", "exp_avg_sq", "step", "momentum_buffer"):
            own = {n: v for n, v in optimizer.moments.items() if n.startswith(f"{key}/")}
            if not own or not self._counts[model]:
                continue
            if set(own) - set(after):
                found.skip(f"{model} {key} after", "not recorded")
                continue
            difference, size = relative_norm(after, own)
            noise = self._noise[model]
            floor = {"exp_avg_sq": noise**2, "step": 0.0}.get(key, noise)
            limit = found.tolerances["moments"] * size + floor
            found.share(f"{model} {key} after", _norm(after, own), size, difference, limit)
        counted = self._counted(model)
        floor = ROUNDING * self._counts[model]
        difference = change = rounding = seen = 0.0
        for name in optimizer.groups:
            first, wanted, got = start[name], optimizer.weights[name], weights[name].double()
            keep = counted.get(name, torch.ones_like(first))
            difference += float((((got - wanted) * keep) ** 2).sum())
            change += float((((wanted - first) * keep) ** 2).sum())
            seen += float((((got - first) * keep) ** 2).sum())
            rounding += float(((floor * first.abs()) ** 2).sum())
        if optimizer.kind in ADAM and self.inputs.is_configured and self._rates[model] > 0:
            self._check_decay(model, weights, start)
        kind = "adam" if optimizer.kind in ADAM else "sgd"
        limit = found.tolerances[kind] * math.sqrt(change) + math.sqrt(rounding)
        limit += self._moved[model] if kind == "sgd" else 0.0
        found.share(
            f"{model} weights after (change)",
            math.sqrt(seen),
            math.sqrt(change),
            math.sqrt(difference),
            limit,
        )
        frozen = [n for n in start if n not in optimizer.groups and n in weights]
        moved = [n for n in frozen if not torch.equal(weights[n].double(), start[n])]
        note = f"such as {moved[0]}" if moved else ""
        found.share(f"{model} frozen weights after", len(moved), 0.0, len(moved), 0.0, note)

    def _check_decay(
        self, model: str, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> None:
        """The coefficient of the weights in what the run's change has beyond the own one."""
        optimizer, config = self._optimizers[model], self.step.config
        for what, wanted, is_matrix in (("matrices", config.l2, True), ("vectors", 0.0, False)):
            names = [n for n in optimizer.groups if (start[n].dim() >= 2) == is_matrix]
            size = sum(float((start[n] ** 2).sum()) for n in names)
            if size == 0:
                continue
            beyond = {n: weights[n].double() - optimizer.weights[n] for n in names}
            overlap = sum(float((beyond[n] * start[n]).sum()) for n in names)
            difference = sum(float((value**2).sum()) for value in beyond.values())
            seen = wanted - overlap / (size * self._rates[model])
            count = math.sqrt(sum(start[n].numel() for n in names))
            # Rounding of Adam's unit steps, and of weights, averaged over all entries.
            noise = count / math.sqrt(size) * self.step.found.tolerances["adam"]
            noise += 3 * ROUNDING * self._counts[model] / self._rates[model]
            limit = self.step.found.tolerances["decay"] * (wanted + noise)
            name = f"{model} weight decay of {what}"
            # Another fault of the update moves weights mostly in other directions.
            if abs(seen - wanted) > limit and overlap**2 < 0.5 * size * difference:
                self.step.found.skip(name, "the change of the weights differs in other ways")
            else:
                self.step.found.share(name, seen, wanted, abs(seen - wanted), limit)

    def _each(self, model: str, noise: float) -> float:
        """What an entry of a model's gradient may have of a norm of rounding."""
        optimizer = self._optimizers[model]
        return 10 * noise / math.sqrt(sum(optimizer.weights[n].numel() for n in optimizer.groups))

    def _counted(self, model: str) -> dict[str, Tensor]:
        """Entries whose gradient is more than rounding: Adam makes unit steps of any."""
        optimizer = self._optimizers[model]
        if optimizer.kind not in ADAM:
            return {}
        second = {
            n: optimizer.moments[f"exp_avg_sq/{n}"]
            for n in optimizer.groups
            if f"exp_avg_sq/{n}" in optimizer.moments
        }
        largest = max((float(v.max()) for v in second.values()), default=0.0)
        share = 1 - max(group.betas[1] for group in optimizer.groups.values())
        bound = max(largest * MIN_MOMENT**2, share * self._each(model, self._noise[model]) ** 2)
        return {n: (v > bound).double() for n, v in second.items()}


def signed(sizes: Array) -> Array:
    """The sizes with signs that are drawn once and for all."""
    return np.asarray(sizes * np.random.default_rng(0).choice((-1.0, 1.0), sizes.shape))


def _norm(run: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float((run[name].double() ** 2).sum()) for name in like))


def aggregation_of(step: Step) -> str:
    """The aggregation that was asked for, or the one of the loss's paper."""
    given = step.config.loss_agg_mode
    if given is not None:
        return given
    return POLICY_LOSSES[step.config.policy_loss_name].aggregation


def unrecomputable(step: Step) -> dict[str, str]:
    """Models whose gradients depend on what is not recorded, and why."""
    config, found = step.config, {}
    if config.policy_loss_name not in POLICY_LOSSES:
        found["actor"] = f"policy loss {config.policy_loss_name} is the caller's own"
    elif config.pretrain_data is not None and config.ptx_coef > 0:
        found["actor"] = "texts of pretrain_data are not recorded"
    elif config.aux_loss_coef > 0:
        found["actor"] = "the balance of experts is not recomputed"
    elif config.lora_rank > 0 and config.lora_dropout > 0:
        found["actor"] = "dropout is random"
    for model, facts in step.record.facts.optimizers.items():
        if facts.kind not in KNOWN:
            found.setdefault(model, f"optimizer {facts.kind} is the caller's own")
    return found
