"""Options of one part of a run: what watches a run."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    NOT_SFT,
    monitoring_option,
)
from lightrft.config.registry import (
    LOGGERS,
)


@dataclass(kw_only=True)
class MonitoringOptions:
    """What watches a run."""

    use_wandb: str | bool | None = monitoring_option(
        False,
        "Log to Weights & Biases; a key given here is neither shown nor saved, without one "
        "WANDB_API_KEY or an earlier login counts.",
        secret=True,
    )
    wandb_org: str | None = monitoring_option(None, "W&B entity, SwanLab workspace.")
    wandb_group: str | None = monitoring_option(None, "Group in W&B, Trackio and SwanLab.")
    wandb_project: str = monitoring_option(
        "lightrft_train_ppo",
        "Project (MLflow: experiment) of the trackers.",
    )
    wandb_run_name: str = monitoring_option(
        "ppo_%m%dT%H:%M",
        "W&B name of the run; %-codes are those of strftime.",
    )
    heartbeat_seconds: float = monitoring_option(
        60.0,
        "Say which phase is under way after so long without a line.",
        above=0,
        at_most=1e7,
    )
    peak_tflops: float | None = monitoring_option(
        None,
        "Peak of a device for the metric mfu, in 1e12 operations per second; unset knows "
        "common GPUs.",
        above=0,
        may_change=False,
    )
    alarm_kl: float | None = monitoring_option(
        None,
        "Warn when the KL to the reference or of an update exceeds this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_entropy: float | None = monitoring_option(
        None,
        "Warn when the entropy falls below this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_length: float | None = monitoring_option(
        None,
        "Warn when the mean response length exceeds this.",
        above=0,
        commands=NOT_SFT,
    )
    alarm_reward_std: float | None = monitoring_option(
        None,
        "Warn when the standard deviation of rewards falls below this.",
        above=0,
        commands=NOT_SFT,
    )
    stop_on_alarm: bool = monitoring_option(
        False,
        "End the run after the step of an alarm, with a checkpoint and exit code 9; also "
        "without any alarm_* bound numbers that are not finite, skipped steps and steps that "
        "change nothing are alarms.",
    )
    parity_check_steps: int = monitoring_option(
        0,
        "Compare engine and trainer logprobs in the first step and every N; 0: first only (with "
        "stream_chunk every one), -1: never.",
        at_least=-1,
        may_change=False,
        commands=NOT_SFT,
    )
    parity_limit: float | None = monitoring_option(
        None,
        "Mean distance of a logprob which that allows; unset depends on the dtype.",
        above=0,
        may_change=False,
        commands=NOT_SFT,
    )
    ledger_gate: bool = monitoring_option(
        True,
        "Compare each row to train on with what was written down as it was sampled and scored.",
        may_change=False,
        commands=NOT_SFT,
    )
    loggers: tuple[str, ...] = monitoring_option(
        (),
        "Further receivers of metrics: trackio, mlflow, swanlab (offline, in OUTPUT_DIR), or "
        "FILE.py:CLASS, made from the options.",
        choices=LOGGERS,
    )
    audit_every: int = monitoring_option(
        0,
        "Record every K-th step, with the states before and after, for lightrft audit; 0 is never.",
        at_least=0,
    )
    verbose: bool = monitoring_option(
        False,
        "Show on the console what else is in OUTPUT_DIR/logs: engine, memory, weight sync "
        "and more metrics of each step.",
        common=True,
    )
