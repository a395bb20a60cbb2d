"""Length, folders, checkpoints and monitoring of a run."""

from pathlib import Path

from lightrft.config.options import (
    checks,
    excludes,
    nonzero,
    option,
    part,
)
from lightrft.config.registry import (
    LOGGERS,
)


@part("run", may_change=True)
class FolderOptions:
    """The folder of a run."""

    output_dir: str = option(
        "lightrft_run",
        "Folder for everything that the run writes.",
        common=True,
        path="folder",
    )


@part("run", may_change=True)
class RunControlOptions(FolderOptions):
    """Length, folders and checkpoints of a run."""

    max_epochs: int = option(
        1,
        "Passes over the samples of one step; on rows, over the rows.",
        at_least=1,
        group="algorithm",
    )
    max_steps: int | None = option(
        None,
        "Stop after this many steps (rollout batches).",
        at_least=1,
        common=True,
    )
    save_steps: int = option(
        -1,
        "Steps between checkpoints; -1 writes one at the end.",
        at_least=-1,
        common=True,
    )
    eval_steps: int = option(
        -1,
        "Steps between evaluations; -1 evaluates at both ends.",
        at_least=-1,
        acts_with="eval_data",
    )
    logging_steps: int = option(
        1,
        "Steps between lines on the console.",
        at_least=1,
    )
    ckpt_path: str | None = option(
        None,
        "Folder of checkpoints; unset is OUTPUT_DIR/checkpoints.",
        path="folder",
    )
    save_path: str | None = option(
        None,
        "Folder of the trained model; unset is OUTPUT_DIR/model.",
        path="folder",
    )
    best_metric: str | None = option(
        None,
        "Keep the model of the best evaluation by this metric, such as eval/reward, in the "
        "folder best beside the checkpoints: the smallest eval/loss, perplexity, "
        "calibration_error, truncated_share or masked_share, of others the largest.",
        acts_with="eval_data",
        may_change=False,
    )
    load_checkpoint: bool = option(
        False,
        "Continue also a complete run; an unfinished one continues without it.",
    )
    allow_changes: bool = option(
        False,
        "Continue a run although a changed option makes it inexact.",
    )
    max_ckpt_num: int = option(3, "Checkpoints to keep.", at_least=1)
    max_ckpt_mem: float = option(
        1e8,
        "MB of checkpoints to keep; the newest always stays.",
        above=0,
        finite=False,
    )
    check_memory: bool = option(
        True,
        "Compare the memory that a run will need with that of its machine before it starts; "
        "on GPUs refuse what cannot fit.",
    )
    num_threads: int | None = option(
        None,
        "CPU threads of a process; unset on a CPU is what the size of the model's operations "
        "is worth, or OMP_NUM_THREADS.",
        at_least=1,
        by_machine=True,
        may_change=False,
    )

    rules = checks(
        nonzero("save_steps"),
        nonzero("eval_steps"),
    )

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the resumable checkpoints."""
        return Path(self.ckpt_path or Path(self.output_dir) / "checkpoints")

    @property
    def model_dir(self) -> Path:
        """Folder of the trained model in Hugging Face format."""
        return Path(self.save_path or Path(self.output_dir) / "model")


@part("run", may_change=True)
class RecordOptions:
    """The file of all samples."""

    save_rollouts: bool = option(
        False,
        "Write every sample with its token ids to rollouts.jsonl, which lightrft rows reads: some "
        "six bytes a token.",
    )
    save_rollout_texts: bool = option(
        False,
        "Write also text, label and columns of the row on each line of rollouts.jsonl.",
        acts_with="save_rollouts",
    )


@part("run", may_change=True)
class PolicyRunOptions(RecordOptions):
    """Length and samples of reinforcement."""

    num_episodes: int = option(
        1,
        "Passes over the training prompts; they set the number of steps. With dynamic_sampling a "
        "step may draw more prompts, and the same steps then make more passes.",
        at_least=1,
        common=True,
    )
    sample_steps: int = option(
        10,
        "Steps between samples on the console, the best and the worst of a prompt; 0 shows none.",
        at_least=0,
    )
    save_trajectories: bool = option(
        False,
        "Write tokens with logprobs, advantages and rewards to trajectories.jsonl.",
    )
    num_trajectories_to_save: int = option(
        10,
        "Samples of one step in trajectories.jsonl.",
        at_least=1,
        acts_with="save_trajectories",
    )
    trajectory_steps: int | None = option(
        None,
        "Write the first step and every N-th to trajectories.jsonl; unset is save_steps, or "
        "every step without. A step that is written costs a forward pass that others save.",
        at_least=1,
        acts_with="save_trajectories",
    )


@part("monitoring", may_change=True)
class MonitoringOptions:
    """Observers of a run, and its alarms."""

    use_wandb: str | bool | None = option(
        False,
        "Log to Weights & Biases; a key given here is neither shown nor saved, without one "
        "WANDB_API_KEY or an earlier login counts.",
        secret=True,
    )
    wandb_org: str | None = option(None, "W&B entity, SwanLab workspace.")
    wandb_group: str | None = option(None, "Group in W&B, Trackio and SwanLab.")
    wandb_project: str = option(
        "lightrft_train_ppo",
        "Project (MLflow: experiment) of the trackers.",
    )
    wandb_run_name: str = option(
        "ppo_%m%dT%H:%M",
        "W&B name of the run; %-codes are those of strftime.",
    )
    heartbeat_seconds: float = option(
        60.0,
        "Say which phase is under way after so long without a line.",
        above=0,
        at_most=1e7,
    )
    peak_tflops: float | None = option(
        None,
        "Peak of a device for the metric mfu, in 1e12 operations per second; unset knows "
        "common GPUs.",
        above=0,
        may_change=False,
    )
    stop_on_alarm: bool = option(
        False,
        "End the run after the step of an alarm, with a checkpoint and exit code 9; also "
        "without any alarm_* bound numbers that are not finite, skipped steps and steps that "
        "change nothing are alarms.",
    )
    loggers: tuple[str, ...] = option(
        (),
        "Further receivers of metrics: trackio, mlflow, swanlab (offline, in OUTPUT_DIR), or "
        "FILE.py:CLASS, made from the options.",
        choices=LOGGERS,
    )
    audit_every: int = option(
        0,
        "Record every K-th step, with the states before and after, for lightrft audit; 0 is never.",
        at_least=0,
    )
    verbose: bool = option(
        False,
        "Show on the console what else is in OUTPUT_DIR/logs: engine, memory, weight sync "
        "and more metrics of each step.",
        common=True,
    )

    rules = checks(
        *excludes(
            "audit_every",
            {
                "teachers or teacher_prompt_column": "an audit follows one teacher that reads the "
                "student's prompts",
                "adam_8bit": "an audit recomputes moments of 32 bits",
                "freeze_prefix": "an audit follows all weights",
            },
        ),
    )


@part("monitoring", may_change=True)
class AlarmOptions(MonitoringOptions):
    """Alarms and comparisons of reinforcement."""

    alarm_kl: float | None = option(
        None,
        "Warn when the KL to the reference or of an update exceeds this.",
        above=0,
    )
    alarm_entropy: float | None = option(
        None,
        "Warn when the entropy falls below this.",
        above=0,
    )
    alarm_length: float | None = option(
        None,
        "Warn when the mean response length exceeds this.",
        above=0,
    )
    alarm_reward_std: float | None = option(
        None,
        "Warn when the standard deviation of rewards falls below this.",
        above=0,
    )
    parity_check_steps: int = option(
        0,
        "Compare engine and trainer logprobs in the first step and every N; 0: first only (with "
        "stream_chunk every one), -1: never.",
        at_least=-1,
        may_change=False,
    )
    parity_limit: float | None = option(
        None,
        "Mean distance of a logprob which that allows; unset depends on the dtype.",
        above=0,
        may_change=False,
        acts_with="parity_check_steps >= 0",
        acts_when=lambda c: c.parity_check_steps >= 0,
    )
    ledger_gate: bool = option(
        True,
        "Compare each row to train on with what was written down as it was sampled and scored.",
        may_change=False,
    )


@part("monitoring", may_change=True)
class StrictOptions:
    """TensorBoard, and how strict a run is."""

    use_tensorboard: str | bool | None = option(
        False,
        "Write TensorBoard logs, into this folder or OUTPUT_DIR/tensorboard.",
    )
    strict: bool = option(
        False,
        "Options without effect are errors instead of warnings.",
    )


@part("monitoring", may_change=True)
class LogOptions(StrictOptions):
    """Logs of a strategy, and how strict it is."""

    log_dir: str | None = option(
        None,
        "Folder of logs and of length distributions.",
    )
    plot_every: int = option(
        -1,
        "Write the generation length distribution every N steps; 0 or less never.",
        acts_with="log_dir",
    )


class OutputOptions(AlarmOptions, PolicyRunOptions, RunControlOptions, LogOptions):
    """Files of a run, and its observers."""
