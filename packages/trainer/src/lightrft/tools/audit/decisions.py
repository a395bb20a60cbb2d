"""Values that a step must have by its options, the count of updates and the previous step.

A recorded number is used only where none of these sources determines it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.config.files import lines_of, parse_object
from lightrft.config.options import is_number, options_of
from lightrft.config.parts.learning import AlgorithmOptions
from lightrft.config.parts.rollout import ShapingOptions
from lightrft.config.parts.run_control import MonitoringOptions
from lightrft.tools.audit.losses import kl_term
from lightrft.tools.audit.pairs import Draw, Pair
from lightrft.tools.audit.record import CONFIG, RecordError, StepRecord, read_record, recorded_steps
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
    run, rows = before.values, build_rows(before.samples, config)
    mask = rows.padded(run.response_mask)
    num_rows = int(mask.any(dim=1).sum())
    if num_rows == 0:
        return before.facts.kl_coef
    seen = (rows.padded(each) for each in (run.old_logprobs, run.ref_logprobs))
    old, reference = (Pair(each, each) for each in seen)
    terms = kl_term(kl_estimator(config), old, reference, old, mask, Draw(0.0))
    error = float(terms.sum()) / num_rows / config.kl_target - 1
    bounded = min(max(error, -MAX_KL_ERROR), MAX_KL_ERROR)
    return before.facts.kl_coef * (1 + bounded * len(mask) / config.kl_horizon)


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
