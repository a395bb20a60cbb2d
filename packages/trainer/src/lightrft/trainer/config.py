"""All options of a training run, in one flat record: the single source of flags and TOML keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightrft.strategy.config import StrategyConfig
from lightrft.trainer.config_checks import batch_problems, range_problems
from lightrft.trainer.config_files import read_toml, write_toml
from lightrft.trainer.config_unavailable import unavailable_problems

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PolicyLoss = Literal["clipped"]
AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def _about(group: str, help_text: str) -> Mapping[str, str]:
    return {"group": group, "help": help_text}


class ConfigError(ValueError):
    """Options that cannot be run.

    Args:
        problems: One line per problem, all of them at once.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(kw_only=True)
class TrainConfig(StrategyConfig):
    """Options of `lightrft train`: those of the strategy and those below.

    Raises:
        ConfigError: Values out of range or contradictory; the message lists all of them.
    """

    # Data
    prompt_data: str | None = field(
        default=None, metadata=_about("data", "Training prompts: a JSONL, JSON or Parquet file")
    )
    eval_data: str | None = field(
        default=None, metadata=_about("data", "Evaluation prompts, same formats")
    )
    input_key: str = field(default="input", metadata=_about("data", "Column that holds the prompt"))
    label_key: str = field(
        default="label", metadata=_about("data", "Column that holds the reference answer")
    )
    apply_chat_template: bool = field(
        default=False, metadata=_about("data", "Render prompts by the chat template")
    )
    system_prompt: str | None = field(
        default=None, metadata=_about("data", "System message put before every prompt")
    )
    input_template: str | None = field(
        default=None, metadata=_about("data", "Text around the prompt; must contain {}")
    )
    prompt_max_len: int = field(
        default=1024, metadata=_about("data", "Longest prompt in tokens; longer ones are left out")
    )
    max_samples: int = field(
        default=1_000_000, metadata=_about("data", "Use at most this many training prompts")
    )
    max_eval_samples: int = field(
        default=500, metadata=_about("data", "Use at most this many evaluation prompts")
    )

    # Rewards
    reward_fn: tuple[str, ...] = field(
        default=(),
        metadata=_about("reward", "Rewards, summed: boxed_math, gsm8k or FILE.py:FUNCTION"),
    )

    # Rollout
    rollout_batch_size: int = field(
        default=512, metadata=_about("rollout", "Prompts per step, over all ranks")
    )
    generate_max_len: int = field(
        default=1024, metadata=_about("rollout", "Longest response in tokens")
    )
    temperature: float = field(default=1.0, metadata=_about("rollout", "Sampling temperature"))
    top_p: float = field(
        default=1.0, metadata=_about("rollout", "Nucleus sampling; 1 keeps all tokens")
    )
    top_k: int = field(
        default=-1, metadata=_about("rollout", "Keep the k most likely tokens; -1 keeps all")
    )

    # Algorithm
    policy_loss: PolicyLoss = field(default="clipped", metadata=_about("algorithm", "Policy loss"))
    loss_agg_mode: AggregationMode = field(
        default="seq-mean-token-mean",
        metadata=_about("algorithm", "How token losses become one number"),
    )
    eps_clip: float = field(
        default=0.2, metadata=_about("algorithm", "Clip range of the probability ratio")
    )
    eps_clip_low: float | None = field(
        default=None, metadata=_about("algorithm", "Lower clip range; default eps_clip")
    )
    eps_clip_high: float | None = field(
        default=None, metadata=_about("algorithm", "Upper clip range; default eps_clip")
    )
    value_clip: float = field(
        default=0.2,
        metadata=_about("algorithm", "Clip range of the value change; 0 switches it off"),
    )
    gamma: float = field(default=1.0, metadata=_about("algorithm", "Discount per token"))
    lambd: float = field(
        default=0.95, metadata=_about("algorithm", "Lambda of generalised advantage estimation")
    )
    init_kl_coef: float = field(
        default=0.01,
        metadata=_about(
            "algorithm", "Weight of the KL to the reference model; 0 loads no reference model"
        ),
    )
    kl_target: float | None = field(
        default=None,
        metadata=_about("algorithm", "Adapt the KL weight towards this KL per response token"),
    )
    entropy_coef: float = field(
        default=0.0, metadata=_about("algorithm", "Weight of the entropy bonus")
    )
    max_epochs: int = field(
        default=1, metadata=_about("algorithm", "Passes over the samples of one step")
    )

    # Run
    output_dir: str = field(
        default="lightrft_run", metadata=_about("run", "Folder for everything the run writes")
    )
    num_episodes: int = field(default=1, metadata=_about("run", "Passes over the training prompts"))
    max_steps: int | None = field(
        default=None, metadata=_about("run", "Stop after this many steps (rollout batches)")
    )
    save_steps: int = field(
        default=-1, metadata=_about("run", "Checkpoint every so many steps; -1 only at the end")
    )
    eval_steps: int = field(
        default=-1, metadata=_about("run", "Evaluate every so many steps; -1 only at both ends")
    )
    logging_steps: int = field(
        default=1, metadata=_about("run", "Print metrics every so many steps")
    )
    ckpt_path: str | None = field(
        default=None, metadata=_about("run", "Checkpoints; default OUTPUT_DIR/checkpoints")
    )
    save_path: str | None = field(
        default=None, metadata=_about("run", "Final model; default OUTPUT_DIR/model")
    )
    load_checkpoint: bool = field(
        default=False, metadata=_about("run", "Continue from the newest complete checkpoint")
    )
    max_ckpt_num: int = field(
        default=3, metadata=_about("run", "Keep at most this many checkpoints")
    )
    max_ckpt_mem: float = field(
        default=1e8, metadata=_about("run", "Keep at most this many MB of checkpoints")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [*unavailable_problems(self), *range_problems(self)]
        if problems:
            raise ConfigError(problems)

    @property
    def clip_low(self) -> float:
        """Distance of the lower clip bound from 1."""
        return self.eps_clip if self.eps_clip_low is None else self.eps_clip_low

    @property
    def clip_high(self) -> float:
        """Distance of the upper clip bound from 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the resumable checkpoints."""
        return (
            Path(self.output_dir) / "checkpoints"
            if self.ckpt_path is None
            else Path(self.ckpt_path)
        )

    @property
    def model_dir(self) -> Path:
        """Folder of the final model in Hugging Face format."""
        return Path(self.output_dir) / "model" if self.save_path is None else Path(self.save_path)

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator needs a value model."""
        return self.advantage_estimator == "gae"

    def check_world_size(self, world_size: int) -> None:
        """Check that the batch sizes fit together on `world_size` processes.

        Raises:
            ConfigError: They do not; the message shows all numbers and the nearest legal values.
        """
        problems = batch_problems(self, world_size)
        if problems:
            raise ConfigError(problems)

    def save(self, path: str | Path) -> None:
        """Write all options as TOML, except secrets and those left at None."""
        write_toml(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> TrainConfig:
        """Read a file that `save` wrote or a user did; missing keys take their defaults.

        Raises:
            ConfigError: The file is not TOML, or holds unknown keys or bad values.
        """
        values = read_toml(Path(path))
        known = {entry.name for entry in fields(cls)}
        unknown = [f"{path}: unknown key {name!r}" for name in values if name not in known]
        if unknown:
            raise ConfigError(unknown)
        return cls(**values)
