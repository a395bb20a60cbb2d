"""Values that a step must have by its options, the count of updates and the previous step.

A recorded number is used only where none of these sources determines it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.files import lines_of, parse_object
from lightrft.config.options import is_number, options_of
from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.config.parts.rollout import ShapingOptions
from lightrft.config.parts.run_control import MonitoringOptions
from lightrft.config.parts.training import TrainingOptions
from lightrft.tools.audit.findings import Findings
from lightrft.tools.audit.losses import kl_term
from lightrft.tools.audit.optimizers import ADAM, ADAM_EPS, DECOUPLED
from lightrft.tools.audit.pairs import Borders, Pair
from lightrft.tools.audit.record import (
    CONFIG,
    Flags,
    Integers,
    RawSamples,
    RecordError,
    StepRecord,
    UpdateFacts,
    named,
    read_record,
    recorded_steps,
    rows_of,
)
from lightrft.tools.audit.samples import build_rows, merged_moments, paid_rewards

# Largest relative change of the KL weight in one step.
MAX_KL_ERROR = 0.2
METRICS, NO_UPDATE = "metrics.jsonl", ("dynamic/skipped_steps", "undecided_steps")


def options_of_step(run: Path, record: StepRecord) -> tuple[TrainConfig, bool]:
    """Return the options of a step, and whether its optimizers were built from them.

    The options are those of the run. The step's record supplies only options that a run may change
    or decide on its way. Without a config.toml of the run, the trainer was built in Python, and
    perhaps its optimizers, too.
    """
    recorded = TrainConfig.load(record.folder / CONFIG)
    if not (run / CONFIG).is_file():
        return recorded, False
    options = TrainConfig.load(run / CONFIG)
    free = {
        name: recorded.__dict__[name]
        for name, (_, info) in options_of(TrainConfig).items()
        if info.may_change
        or options.allow_changes
        or (info.by_machine and options.__dict__[name] is None)
    }
    return options.replaced(free), True


def step_before(run: Path, record: StepRecord, config: MonitoringOptions) -> StepRecord | None:
    """Return the record of the previous step; None if missing or perhaps of another attempt."""
    number = record.facts.step - 1
    # A continued run that records fewer steps leaves records of the earlier attempt in place.
    if config.audit_every == 1 and number in recorded_steps(run):
        with contextlib.suppress(RecordError):
            return read_record(run, number)
    return None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Values at the start of a step, and sizes of its update.

    Args:
        kl_coef: Weight of the KL term; None if unknown.
        reward_moments: Count, mean and squared deviations of all earlier rewards; empty without
            running normalisation, None if unknown.
        lora_scale: Scale of the adapters; 0 without.
        schedule_steps: Optimizer steps of the whole run, by model; 0 if unknown.
        counts: Optimizer steps before this step, by model; None if unknown.
    """

    kl_coef: float | None
    reward_moments: list[float] | None
    lora_scale: float
    schedule_steps: Mapping[str, int]
    counts: Mapping[str, int | None]


def decide(
    run: Path,
    record: StepRecord,
    before: StepRecord | None,
    config: TrainConfig,
    *,
    is_configured: bool,
    planned: tuple[int, int] | None,
) -> Decisions:
    """Return the decisions of a step.

    Args:
        run: Folder of the run, whose metrics name skipped updates.
        record: Record of the step.
        before: Record of the previous step; None without.
        config: Options of the step.
        is_configured: True if all models are built from the options.
        planned: Fewest and most steps of the run; if they differ, the run's count is used.
    """
    least, most = planned or (0, record.facts.num_planned)
    num_planned = most if least == most else record.facts.num_planned
    has_reference = is_configured or record.values.ref_logprobs.size > 0
    facts = record.facts
    return Decisions(
        _kl_coef(record, before, config) if has_reference else 0.0,
        _reward_moments(record, before, config),
        config.lora_alpha / config.lora_rank if config.lora_rank else 0.0,
        {
            name: _taken_steps(name, num_planned, config) * _updates_of_step(config)
            if is_configured
            else 0
            for name in facts.optimizers
        },
        {name: _count(name, run, record, before, config) for name in facts.optimizers},
    )


def kl_estimator(config: ShapingOptions) -> str:
    """Return the KL estimator: the user's, else k3+ in the loss or k1 in the reward."""
    return config.kl_estimator or ("k3+" if config.use_kl_loss else "k1")


def _taken_steps(model: str, num_steps: int, config: AlgorithmOptions) -> int:
    """Return how many of the first `num_steps` steps update a model."""
    num_frozen = max(config.freezing_actor_steps, 0) if model == "actor" else 0
    return max(num_steps - num_frozen, 0)


def _updates_of_step(config: TrainConfig) -> int:
    num_rows = config.rollout_batch_size * config.n_samples_per_prompt
    return num_rows // config.train_batch_size * config.max_epochs


def _kl_coef(record: StepRecord, before: StepRecord | None, config: TrainConfig) -> float | None:
    """Adapt the weight to the previous step's KL: Ziegler et al. 2019, arXiv:1909.08593."""
    if config.init_kl_coef == 0 or config.kl_target is None or record.facts.step == 1:
        return config.init_kl_coef
    if before is None:
        return None
    run, lengths = before.values, before.samples.prompt_lengths + before.samples.response_lengths
    mask = run.response_mask
    num_rows = sum(bool(mask[where].any()) for where in rows_of(lengths))
    if num_rows == 0:
        return before.facts.kl_coef
    exact = (torch.from_numpy(each).double() for each in (run.old_logprobs, run.ref_logprobs))
    old, reference = (Pair(each, each) for each in exact)
    is_token = torch.from_numpy(mask)
    terms = kl_term(kl_estimator(config), old, reference, old, is_token, Borders(0.0))
    error = np.clip(
        float(terms.sum()) / num_rows / config.kl_target - 1, -MAX_KL_ERROR, MAX_KL_ERROR
    )
    return float(before.facts.kl_coef * (1 + error * len(lengths) / config.kl_horizon))


def _reward_moments(
    record: StepRecord, before: StepRecord | None, config: TrainConfig
) -> list[float] | None:
    if not config.reward_running_norm:
        return []
    if record.facts.step == 1:
        return [0.0, 0.0, 0.0]
    if before is None:
        return None
    rewards = paid_rewards(before.samples, config)[0]
    is_kept = build_rows(before.samples, config).is_kept
    return merged_moments(before.facts.reward_moments, rewards[is_kept])


def _count(
    model: str, run: Path, record: StepRecord, before: StepRecord | None, config: TrainConfig
) -> int | None:
    """Return the number of optimizer steps of a model before this step."""
    num_steps = record.facts.step - 1
    if before is not None:
        made = [u for u in before.facts.updates if u.model == model and not u.is_skipped]
        return before.facts.optimizers[model].schedule_position + len(made)
    if num_steps and config.allow_changes:
        return None
    num_steps = _taken_steps(model, num_steps, config)
    left_out = read_left_out(model, run, record.facts.step, config)
    return None if left_out is None else round((num_steps - left_out) * _updates_of_step(config))


def read_left_out(model: str, run: Path, step: int, config: TrainConfig) -> float | None:
    """Return how many earlier steps were skipped by the run's metrics; None if unknown.

    A step is skipped if gradients are not finite or no row has a signal.
    """
    path, total = run / METRICS, 0.0
    if not path.is_file():
        return None if config.dynamic_sampling and step > 1 else 0.0
    names = ("skipped_steps" if model == "actor" else f"{model}_skipped_steps", *NO_UPDATE)
    first = config.freezing_actor_steps + 1 if model == "actor" else 1
    for entry in map(parse_object, lines_of(path)):
        number, counts = entry.get("step"), [entry.get(name) for name in names]
        if is_number(number) and max(first, 1) <= number < step:
            shares = [count for count in counts if is_number(count) and 0 <= count <= 1]
            total += max(shares, default=0.0)
    return total


def check_decisions(
    results: Findings, decided: Decisions, record: StepRecord, config: TrainConfig, is_kept: Flags
) -> None:
    """Compare the values at the start of a step, and the sizes and contents of its update.

    Args:
        results: Collector of the comparisons.
        decided: Expected values.
        record: Record of the step.
        config: Options of the step.
        is_kept: Rows that are trained on: [rows] bool.
    """
    facts = record.facts
    _check_groups(results, record.samples, config)
    if decided.kl_coef is None:
        results.skip("KL weight", "it follows the KL of the step before, which is not recorded")
    else:
        # Allow for float32 rounding of a row's KL terms.
        results.number("KL weight", facts.kl_coef, decided.kl_coef, floor=1e-6 * decided.kl_coef)
    _check_moments(results, decided, record, config)
    has_updates = bool(is_kept.any())
    for model in facts.optimizers:
        is_frozen = model == "actor" and facts.step <= config.freezing_actor_steps
        num_epochs = config.max_epochs if has_updates and not is_frozen else 0
        updates = [update for update in facts.updates if update.model == model]
        _check_updates(results, model, updates, record, config, num_epochs)
        _check_micro_batches(results, updates, record.samples, config)


def _check_groups(results: Findings, samples: RawSamples, config: TrainConfig) -> None:
    """Check that rows of a group share their prompt, and that each group is complete."""
    whole = list(rows_of(samples.prompt_lengths + samples.response_lengths))
    prompts = [
        samples.token_ids[where][:size].tobytes()
        for where, size in zip(whole, samples.prompt_lengths, strict=True)
    ]
    groups, first = np.unique(samples.group_ids, return_index=True)
    of_group = dict(zip(groups.tolist(), first.tolist(), strict=True))
    strange = [
        prompt != prompts[of_group[group]]
        for prompt, group in zip(prompts, samples.group_ids.tolist(), strict=True)
    ]
    results.exact("prompts of groups", np.array(strange), np.zeros(len(strange), dtype=np.bool_))
    sizes = np.array([int((samples.group_ids == group).sum()) for group in groups])
    wanted = np.full(config.rollout_batch_size, config.n_samples_per_prompt)
    results.exact("rows of groups", sizes, wanted)


def _check_moments(
    results: Findings, decided: Decisions, record: StepRecord, config: TrainConfig
) -> None:
    seen, wanted_moments = record.facts.reward_moments, decided.reward_moments
    name = "rewards counted before"
    if wanted_moments is None:
        most = (record.facts.step - 1) * config.rollout_batch_size * config.n_samples_per_prompt
        # Failed rewards are not counted.
        fails = config.reward_failure == "mask" or config.dynamic_sampling or config.has_episodes
        least = 1 if fails or config.allow_changes else most
        count = seen[0] if seen else 0.0
        short = max(0.0, least - count, 0.0 if config.allow_changes else count - most)
        results.add(name, count, float(most), short, 0.0)
    elif wanted_moments and len(seen) == len(wanted_moments):
        spread = math.sqrt(wanted_moments[2] / max(wanted_moments[0], 1))
        names = (name, "their mean", "their squared deviations")
        for each, run, wanted, scale in zip(
            names, seen, wanted_moments, (0.0, spread, 0.0), strict=True
        ):
            results.number(each, run, wanted, scale=scale)
    elif wanted_moments or seen:
        results.add(name, float(len(seen)), float(len(wanted_moments)), math.inf, 0.0)


def _check_updates(
    results: Findings,
    model: str,
    updates: Sequence[UpdateFacts],
    record: StepRecord,
    config: TrainingOptions,
    num_epochs: int,
) -> None:
    """Check that each epoch trains every row once, in the batches drawn from the seed."""
    place = {int(i): row for row, i in enumerate(record.samples.sample_ids)}
    num_rows, size = len(place), config.train_batch_size
    num_batches = num_rows // size
    batches = [[place[i] for micro in u.micro_batches for i in micro] for u in updates]
    results.number(f"updates of the {model}", len(batches), num_epochs * num_batches)
    sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
    results.exact(f"rows of each update of the {model}", sizes, np.full(len(batches), size))
    epochs = [batches[i : i + num_batches] for i in range(0, len(batches), max(num_batches, 1))]
    trained = [np.sort([row for batch in epoch for row in batch]) for epoch in epochs]
    each = np.concatenate([np.zeros(0, np.int64), *trained])
    results.exact(f"rows that train the {model}", each, np.tile(np.arange(num_rows), num_epochs))
    if (sizes == size).all():
        order = np.random.default_rng([config.seed, record.facts.step - 1]).permutation(num_rows)
        planned = _in_order(order.reshape(-1, size).tolist())
        is_odd = np.array([_in_order(epoch) != planned for epoch in epochs], dtype=np.bool_)
        wanted = np.zeros(num_epochs, dtype=np.bool_)
        results.exact(f"optimizer batches of the {model}", is_odd, wanted)


def _in_order(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sort the rows of each batch, then the batches."""
    return sorted(sorted(batch) for batch in batches)


def _check_micro_batches(
    results: Findings, updates: Sequence[UpdateFacts], samples: RawSamples, config: TrainConfig
) -> None:
    """Check that micro batches have the configured number of rows or tokens."""
    size, tokens = config.micro_train_batch_size, config.micro_batch_tokens
    micros = [micro for update in updates for micro in update.micro_batches]
    if tokens is None and not config.packing_samples:
        sizes = np.array([len(micro) for micro in micros], dtype=np.int64)
        results.exact("rows of micro batches", sizes, np.full(len(micros), size))
        return
    lengths = samples.prompt_lengths + samples.response_lengths
    by_id = dict(zip(samples.sample_ids.tolist(), lengths.tolist(), strict=True))
    limit = tokens or size * config.max_episode_tokens
    several = [np.array([by_id[i] for i in micro]) for micro in micros if len(micro) > 1]
    check_tokens(results, several, config.packing_samples, limit)


def check_tokens(
    results: Findings, micros: Sequence[Integers], packs: bool | None, limit: int
) -> None:
    """Check that micro batches of several rows stay within the limit of tokens."""
    held = [int(each.sum() if packs else len(each) * each.max()) for each in micros]
    most = max(held, default=0)
    results.add("tokens of micro batches", float(most), float(limit), max(0.0, most - limit), 0.0)


def check_optimizers(
    results: Findings,
    decided: Decisions,
    record: StepRecord,
    config: TrainingOptions,
    states: Mapping[str, Mapping[str, Tensor]],
    wanted: Mapping[str, Collection[str]],
) -> None:
    """Compare optimizer classes, numbers, trained names, counters and schedules with the options.

    Args:
        results: Collector of the comparisons.
        decided: Expected values.
        record: Record of the step.
        config: Options of the step.
        states: States before the step, by model.
        wanted: Names of the trained weights, by model.
    """
    for model, facts in record.facts.optimizers.items():
        count, groups = decided.counts[model], facts.groups
        results.number(f"optimizer of the {model} is AdamW", facts.kind in DECOUPLED, True)
        for key, expected in (("eps", ADAM_EPS), ("betas", config.adam_betas)):
            recorded = [np.ravel(group["numbers"].get(key, math.nan)) for group in groups]
            recorded_values = np.concatenate([np.zeros(0), *recorded])
            results.exact(f"{key} of the {model}", recorded_values, np.tile(expected, len(groups)))
        names = {name for group in groups for name in group["names"]}
        odd = sorted(names ^ set(wanted[model]))
        note = f"such as {odd[0]}" if odd else ""
        sizes = float(len(names)), float(len(wanted[model]))
        results.add(f"trained weights of the {model}", *sizes, float(len(odd)), 0.0, note)
        num_steps = decided.schedule_steps[model]
        if num_steps and facts.schedule_steps:
            results.number(f"schedule length, {model}", facts.schedule_steps, num_steps)
        if count is None:
            results.skip(f"updates of the {model} before", "the run does not say how many it took")
            continue
        results.number(f"schedule position, {model}", facts.schedule_position, count)
        counters = [float(value.max()) for value in named(states[model], "step").values()]
        if counters or (facts.kind in ADAM and count and not named(states[model], "exp_avg")):
            results.number(f"Adam's steps, {model}", max(counters, default=0.0), count)


def check_link(
    results: Findings, before: StepRecord, states: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Check that a step starts with the final weights and optimizer states of the previous one."""
    for model, state in states.items():
        after = before.state("after", model)
        odd = sorted(
            name
            for name in state.keys() | after.keys()
            if name not in state or name not in after or not torch.equal(state[name], after[name])
        )
        note = f"such as {odd[0]}" if odd else ""
        sizes = float(len(state)), float(len(after))
        results.add(f"states before, {model}", *sizes, float(len(odd)), 0.0, note)
