"""Bounds of metrics beyond which a run has probably gone wrong."""

from collections.abc import Mapping

from lightrft.config import TrainConfig


def alarms(config: TrainConfig, metrics: Mapping[str, float]) -> list[str]:
    """One sentence for each metric of a step out of its bounds.

    `alarm_kl` bounds `kl` (to the reference model, per token) and `approx_kl` (of the update). A
    log-probability that is not a number is always too much: `correction_invalid_share`.
    """
    bounds = (
        ("kl", config.alarm_kl, "above"),
        ("approx_kl", config.alarm_kl, "above"),
        ("response_length", config.alarm_length, "above"),
        ("correction_invalid_share", 0.0, "above"),
        ("entropy", config.alarm_entropy, "below"),
        ("reward_std", config.alarm_reward_std, "below"),
    )
    found = []
    for name, bound, side in bounds:
        value = metrics.get(name)
        if value is None or bound is None:
            continue
        if (value > bound) if side == "above" else (value < bound):
            found.append(f"{name} is {value:.4g}, {side} {bound:g}")
    return found
