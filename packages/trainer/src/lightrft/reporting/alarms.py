"""Alarms about the metrics of a step, and the verdict on those of a run; needs no torch."""

import math
from collections.abc import Iterable, Mapping

from lightrft.config import AlarmOptions

# Names of main models: their metrics have no prefix, and their learning rate is NAME_lr.
MAIN_NAMES = ("actor", "model")
# Any number above 0 of these is an alarm.
_NONE_ALLOWED = (
    "nonfinite/rewards",
    "nonfinite/logprobs",
    "nonfinite/losses",
    "skipped_steps",
    "critic_skipped_steps",
    "correction_invalid_share",
)
_RATES = tuple(f"{name}_lr" for name in MAIN_NAMES)


def alarms(
    config: AlarmOptions, metrics: Mapping[str, float], *, compares_groups: bool = False
) -> list[str]:
    """Return one sentence for each thing that is wrong with the metrics of a step.

    `alarm_kl` bounds `kl` (to the reference model, per token) and `approx_kl` (of the update).
    Whatever the options, alarms are raised for a metric or number that is not finite, and for
    skipped optimizer steps. A step that teaches or changes nothing raises one, too.

    Args:
        config: Bounds.
        metrics: Metrics of the step.
        compares_groups: Whether the advantage estimator learns only from differences in a group.
    """
    sentences = []
    nonfinite = [
        f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)
    ]
    if nonfinite:
        sentences.append(f"not finite: {', '.join(nonfinite)}")
    bounds = (
        ("kl", config.alarm_kl, "above"),
        ("approx_kl", config.alarm_kl, "above"),
        ("response_length", config.alarm_length, "above"),
        *((name, 0.0, "above") for name in _NONE_ALLOWED),
        ("entropy", config.alarm_entropy, "below"),
        ("reward_std", config.alarm_reward_std, "below"),
    )
    for name, bound, side in bounds:
        value = metrics.get(name)
        if value is None or bound is None:
            continue
        if (value > bound) if side == "above" else (value < bound):
            sentences.append(f"{name} is {value:.4g}, {side} {bound:g}")
    idle = _equal_rewards(metrics, compares_groups=compares_groups) or why_unchanged(metrics)
    return [*sentences, idle] if idle else sentences


def _equal_rewards(metrics: Mapping[str, float], *, compares_groups: bool) -> str | None:
    """Return the sentence about a step whose rewards teach nothing."""
    if metrics.get("num_samples", 0) < 2 or "teacher_kl" in metrics:
        return None
    reward = f"(mean {metrics.get('reward', math.nan):.4g})"
    if metrics.get("reward_std") == 0:
        return f"all rewards are equal {reward}: nothing to learn from them"
    if compares_groups and metrics.get("constant_group_share") == 1:
        return f"the rewards of every group are equal {reward}: nothing to learn from them"
    return None


def why_unchanged(metrics: Mapping[str, float | None]) -> str | None:
    """Return why a step left the main model unchanged; None if it changed it or froze it."""
    if metrics.get("undecided_steps") == 1:
        return "the reward decided no sample"
    if metrics.get("dynamic/skipped_steps") == 1:
        return "all groups had equal rewards (dynamic_sampling found no other ones)"
    rate = next((metrics[name] for name in _RATES if name in metrics), None)
    if rate is None:  # the model was frozen
        return None
    if metrics.get("skipped_steps") == 1:
        return "every optimizer step was skipped: the gradients were not finite"
    if rate == 0:
        return "the learning rate was 0"
    if metrics.get("zero_gradient_share") == 1:
        return f"the gradient was 0 in every optimizer step: {_why_zero(metrics)}"
    if metrics.get("weights_changed") == 0:
        return f"no weight changed: updates at learning rate {rate:.3g} are below its rounding"
    return None


def _why_zero(metrics: Mapping[str, float | None]) -> str:
    spread = metrics.get("reward_std", 0.0)
    if spread == 0 and "teacher_kl" not in metrics:
        return "all rewards were equal"
    if spread is None or not math.isfinite(spread):
        return "the rewards are too large to compute their spread"
    if metrics.get("truncated_share") == 1 and "advantage_abs" not in metrics:
        return "every response was cut at its limit, and mask_truncated trains on none of these"
    if metrics.get("advantage_abs") == 0:
        return "no advantage differs from 0"
    return "the loss does not depend on the weights"


def run_verdict(steps: Iterable[Mapping[str, float | None]]) -> str:
    """Return the verdict: "trained: ..." if a step changed the main model, else "no update: ...".

    It covers weights, not rewards: the reader must judge whether those rose.

    Args:
        steps: Metrics of every step; None is a number that was not finite.
    """
    reasons: dict[str, int] = {}
    num_steps = num_changed = num_nonfinite = 0
    rewards: list[float] = []
    for metrics in steps:
        num_steps += 1
        num_nonfinite += any(value is None for value in metrics.values())
        reward = metrics.get("reward")
        rewards += [] if reward is None else [reward]
        is_frozen = metrics.keys().isdisjoint((*_RATES, "dynamic/skipped_steps", "undecided_steps"))
        why = "the actor was frozen (freezing_actor_steps)" if is_frozen else why_unchanged(metrics)
        num_changed += why is None
        if why is not None:
            reasons[why] = reasons.get(why, 0) + 1
    if not num_steps:
        return "no update: no step was done"
    notes = [f"{count} of {num_steps} steps: {why}" for why, count in reasons.items()]
    if num_nonfinite:
        notes.append(f"{num_nonfinite} of {num_steps} steps had numbers that were not finite")
    if not num_changed:
        return f"no update: {'; '.join(notes)}"
    text = f"trained: {num_changed} of {num_steps} steps changed the weights"
    if rewards:
        text += f", reward {rewards[0]:.4g} in the first and {rewards[-1]:.4g} in the last"
    return "; ".join([text, *notes])
