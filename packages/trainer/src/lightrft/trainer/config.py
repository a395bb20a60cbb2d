"""All options of a training run, in one flat record: the single source of flags and TOML keys."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from lightrft.strategy.config import ConfigError, option
from lightrft.trainer.batch_checks import batch_problems
from lightrft.trainer.config_checks import unused_options
from lightrft.trainer.config_combinations import combination_problems
from lightrft.trainer.config_files import read_toml, write_toml
from lightrft.trainer.config_samples import SampleOptions
from lightrft.trainer.config_unavailable import UNAVAILABLE, unavailable_problems
from lightrft.trainer.tracking_config import TrackingConfig

POLICY_LOSS_NAMES = (
    "ppo", "clipped", "dapo", "dr_grpo", "gspo", "gspo-token", "gmpo", "cpgd", "cispo", "sapo",
    "reinforce",
)  # fmt: skip
ADVANTAGE_ESTIMATOR_NAMES = (
    "group_norm", "grpo", "gae", "rloo", "reinforce", "reinforce++", "reinforce_baseline",
    "dr_grpo", "cpgd", "opo", "remax",
)  # fmt: skip
AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
CORRECTION_NAMES = ("tis", "icepop", "tis-sequence", "mis", "tis-geometric", "geometric")
CPGD_WEIGHTING_NAMES = ("std", "clip_filter", "centre")
ENTROPY_SCOPES = ("batch", "sequence")
ENGINE_CHOICES = ("auto", "hf", "vllm", "sglang")


@dataclass(kw_only=True)
class TrainConfig(SampleOptions, TrackingConfig):
    """Options of `lightrft train`: those of the strategy and those below.

    Raises:
        ConfigError: Values of wrong type, out of range or contradictory; one message lists all.
    """

    engine_type: str = option(
        "auto", "Rollout engine; auto takes vllm or sglang on a GPU, else hf.", group="engine",
        choices=ENGINE_CHOICES,
    )  # fmt: skip
    advantage_estimator: str = option(
        "group_norm", "Advantage estimator; gae is PPO with a critic.", group="algorithm",
        choices=ADVANTAGE_ESTIMATOR_NAMES,
    )  # fmt: skip

    # Algorithm
    policy_loss: str = option(
        "ppo", "Policy loss; ppo is the clipped surrogate.", group="algorithm",
        choices=POLICY_LOSS_NAMES,
    )  # fmt: skip
    cpgd_weighting: str = option(
        "std", "How advantage_estimator cpgd weighs the centred rewards of a prompt.",
        group="algorithm", choices=CPGD_WEIGHTING_NAMES,
    )  # fmt: skip
    loss_agg_mode: str = option(
        "seq-mean-token-mean", "How the losses of tokens become one number.", group="algorithm",
        choices=AGGREGATION_MODES,
    )  # fmt: skip
    eps_clip: float = option(
        0.2, "Clip range of the ratio; 0.2 leaves a loss the range of its paper.",
        group="algorithm", at_least=0,
    )  # fmt: skip
    eps_clip_low: float | None = option(
        None, "Lower clip range; unset is eps_clip.", group="algorithm", at_least=0, at_most=1
    )
    eps_clip_high: float | None = option(
        None, "Upper clip range; unset is eps_clip.", group="algorithm", at_least=0
    )
    use_gspo: bool = option(False, "The same as policy_loss gspo.", group="algorithm")
    use_cpg_loss: bool = option(False, "The same as policy_loss cpgd.", group="algorithm")
    dual_clip: float | None = option(
        None, "Cap of the ratio where the advantage is negative; unset is off.",
        group="algorithm", above=1,
    )  # fmt: skip
    high_entropy_token_ratio: float = option(
        0.0, "Train on this share of tokens, the least certain ones; 0 takes all.",
        group="algorithm", at_least=0, at_most=1,
    )  # fmt: skip
    high_entropy_scope: str = option(
        "batch", "Take that share of the optimizer batch or of each response.", group="algorithm",
        choices=ENTROPY_SCOPES,
    )  # fmt: skip
    off_policy_correction: str | None = option(
        None, "Weights for the difference between engine and trainer.", group="algorithm",
        choices=(None, *CORRECTION_NAMES),
    )  # fmt: skip
    correction_low: float | None = option(
        None, "Lower bound of off_policy_correction; unset is its own.", group="algorithm",
        at_least=0,
    )  # fmt: skip
    correction_high: float | None = option(
        None, "Upper bound of off_policy_correction; unset is its own.", group="algorithm",
        above=0,
    )  # fmt: skip
    value_clip: float = option(
        0.2, "Clip range of the change of a value; 0 is off.", group="algorithm", at_least=0
    )
    gamma: float = option(1.0, "Discount per token.", group="algorithm", at_least=0, at_most=1)
    lambd: float = option(
        0.95, "Lambda of generalised advantage estimation.", group="algorithm",
        at_least=0, at_most=1,
    )  # fmt: skip
    init_kl_coef: float = option(
        0.01, "Weight of the KL divergence; 0 loads no reference model.", group="algorithm",
        at_least=0,
    )  # fmt: skip
    kl_target: float | None = option(
        None, "Adapt the weight towards this KL divergence per response.", group="algorithm",
        above=0,
    )  # fmt: skip
    kl_horizon: int = option(
        10_000, "Samples over which the weight adapts to kl_target.", group="algorithm",
        at_least=1,
    )  # fmt: skip
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", group="algorithm", at_least=0)
    aux_loss_coef: float = option(
        0.0, "Weight of the loss that balances the experts of a mixture-of-experts model.",
        group="algorithm", at_least=0,
    )  # fmt: skip
    ptx_coef: float = option(
        0.05, "Weight of the language-modelling loss on pretrain_data.", group="algorithm",
        at_least=0,
    )  # fmt: skip
    ptx_batch_size: int | None = option(
        None, "Texts of pretrain_data per optimizer step over all ranks; unset is "
        "train_batch_size.", group="algorithm", at_least=1,
    )  # fmt: skip
    pretrain_column: str = option("text", "Column of the texts in pretrain_data.", group="data")
    max_epochs: int = option(
        1, "Passes over the samples of one step.", group="algorithm", at_least=1
    )

    freezing_actor_steps: int = option(
        -1, "Train only the critic in the first N steps; -1 is off.", group="algorithm",
        at_least=-1,
    )  # fmt: skip
    enable_ema: bool = option(
        False, "Keep a moving average of the actor and save it in OUTPUT_DIR/model_ema.",
        group="algorithm",
    )  # fmt: skip
    ema_beta: float = option(
        0.992, "Weight of the past in the moving average.", group="algorithm", at_least=0,
        at_most=1,
    )  # fmt: skip

    lora_rank: int = option(
        0, "Train adapters of this rank on the actor instead of its weights; 0 trains the weights.",
        group="training", at_least=0,
    )  # fmt: skip
    lora_alpha: float = option(
        16.0, "Adapters count lora_alpha / lora_rank.", group="training", above=0
    )
    lora_dropout: float = option(
        0.0, "Probability of leaving an input of an adapter out.", group="training", at_least=0,
        at_most=0.99,
    )  # fmt: skip
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Layers that get adapters: names of linear layers, or all-linear.",
        group="training",
    )  # fmt: skip

    micro_batch_tokens: int | None = option(
        None, "Cut micro-batches by this many tokens, padding included, instead of by rows.",
        group="training", at_least=1,
    )  # fmt: skip

    peak_tflops: float | None = option(
        None, "Peak of a device for the metric mfu, in 1e12 operations per second; unset knows "
        "common GPUs.", group="monitoring", above=0,
    )  # fmt: skip

    # Alarms
    alarm_kl: float | None = option(
        None, "Warn when the KL to the reference or of an update exceeds this.",
        group="monitoring", above=0,
    )  # fmt: skip
    alarm_entropy: float | None = option(
        None, "Warn when the entropy falls below this.", group="monitoring", above=0
    )
    alarm_length: float | None = option(
        None, "Warn when the mean response length exceeds this.", group="monitoring", above=0
    )
    alarm_reward_std: float | None = option(
        None, "Warn when the standard deviation of rewards falls below this.",
        group="monitoring", above=0,
    )  # fmt: skip
    stop_on_alarm: bool = option(
        False, "End the run after the step of an alarm, with a checkpoint.", group="monitoring"
    )

    parity_check_steps: int = option(
        0, "Compare engine and trainer logprobs in the first step and every N; 0: first only, "
        "-1: never.",
        group="monitoring", at_least=-1,
    )  # fmt: skip
    parity_limit: float | None = option(
        None, "Mean distance of a logprob which that allows; unset depends on the dtype.",
        group="monitoring", above=0,
    )  # fmt: skip

    # Run
    output_dir: str = option(
        "lightrft_run", "Folder for everything that the run writes.", group="run"
    )
    num_episodes: int = option(1, "Passes over the training prompts.", group="run", at_least=1)
    max_steps: int | None = option(
        None, "Stop after this many steps (rollout batches).", group="run", at_least=1
    )
    save_steps: int = option(
        -1, "Steps between checkpoints; -1 writes one at the end.", group="run", at_least=-1
    )
    eval_steps: int = option(
        -1, "Steps between evaluations; -1 evaluates at both ends.", group="run", at_least=-1
    )
    logging_steps: int = option(1, "Steps between lines on the console.", group="run", at_least=1)
    ckpt_path: str | None = option(
        None, "Folder of checkpoints; unset is OUTPUT_DIR/checkpoints.", group="run"
    )
    save_trajectories: bool = option(
        False, "Write tokens with logprobs, advantages and rewards to trajectories.jsonl.",
        group="run",
    )  # fmt: skip
    num_trajectories_to_save: int = option(
        10, "Samples of one step in trajectories.jsonl.", group="run", at_least=1
    )
    save_path: str | None = option(
        None, "Folder of the trained model; unset is OUTPUT_DIR/model.", group="run"
    )
    best_metric: str | None = option(
        None, "Keep the model of the best evaluation by this metric, such as eval/reward, in "
        "the folder best beside the checkpoints; larger is better.", group="run",
    )  # fmt: skip
    load_checkpoint: bool = option(
        False, "Continue also a complete run; an unfinished one continues without it.",
        group="run",
    )  # fmt: skip
    allow_changes: bool = option(
        False, "Continue a run although a changed option makes it inexact.", group="run"
    )
    max_ckpt_num: int = option(3, "Checkpoints to keep.", group="run", at_least=1)
    max_ckpt_mem: float = option(
        1e8, "MB of checkpoints to keep; the newest always stays.", group="run", above=0
    )

    def problems(self) -> list[str]:
        """What is wrong with the values, one line per problem; empty if nothing is."""
        found = [line for line in super().problems() if line.split(":")[0] not in UNAVAILABLE]
        wrong = {line.split(":")[0] for line in found}
        return [
            *found,
            *unavailable_problems(self),
            *combination_problems(self, wrong_fields=wrong),
        ]

    def unused_options(self) -> list[str]:
        """Options that were changed but do nothing in the chosen mode, one sentence each."""
        return [*super().unused_options(), *unused_options(self)]

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the resumable checkpoints."""
        return Path(self.ckpt_path or Path(self.output_dir) / "checkpoints")

    @property
    def model_dir(self) -> Path:
        """Folder of the trained model in Hugging Face format."""
        return Path(self.save_path or Path(self.output_dir) / "model")

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator needs a value model."""
        return self.advantage_estimator == "gae"

    def check_world_size(self, world_size: int) -> None:
        """Check that the batch sizes fit together on `world_size` processes.

        Raises:
            ConfigError: They do not; the message shows all numbers and the nearest legal values.
        """
        found = batch_problems(self, world_size)
        if found:
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(found))

    def save(self, path: str | Path) -> None:
        """Write all options as TOML, except secrets and those that are None."""
        write_toml(self, Path(path), leave_out=UNAVAILABLE)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` or a user wrote; missing keys take their defaults.

        Raises:
            FileNotFoundError: There is no such file.
            ConfigError: It is not TOML, or holds unknown keys or wrong values.
        """
        config = cls.from_args(read_toml(Path(path)))
        if config.extra_args:
            lines = [f"{path}: {unknown_name(name)}" for name in config.extra_args]
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(lines))
        return config


def unknown_name(name: str) -> str:
    """The sentence about an option that does not exist: why, or the nearest names."""
    if name in UNAVAILABLE:
        return f"{name} is not available: {UNAVAILABLE[name]}"
    names = [entry.name for entry in fields(TrainConfig) if entry.name not in UNAVAILABLE]
    near = difflib.get_close_matches(name, names, n=3)
    return f"unknown option {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
