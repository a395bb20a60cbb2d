"""The options of one trainer, resolved from keywords, the strategy's configuration and defaults."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypedDict

from lightrft.strategy.config import ConfigError, StrategyConfig
from lightrft.trainer.batch_checks import batch_problems
from lightrft.trainer.config_checks import (
    DEFAULT_POLICY_LOSS,
    loss_by_alias,
    trainer_problems,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightrft.strategy.prepared import Arguments


class PPOKeywords(TypedDict, total=False):
    """Keywords of the trainers; a keyword that is not given takes the value of the strategy's
    configuration, and the default of `PPOConfig` where that has none.
    """

    seed: int
    sp_size: int
    engine_tp_size: int
    rollout_batch_size: int
    n_samples_per_prompt: int
    train_batch_size: int
    micro_train_batch_size: int
    micro_rollout_batch_size: int
    max_epochs: int
    prompt_max_len: int
    generate_max_len: int
    temperature: float
    top_p: float
    top_k: int
    advantage_estimator: str
    advantages_norm: bool
    advantage_clip: float
    reward_clip: float
    reward_running_norm: bool
    reward_running_norm_minus_mean: bool
    overlong_buffer: bool
    overlong_buffer_len: int
    overlong_buffer_penalty_factor: float
    gamma: float
    lambd: float
    policy_loss: str
    cpgd_weighting: str
    eps_clip: float
    eps_clip_low: float | None
    eps_clip_high: float | None
    value_clip: float
    entropy_coef: float
    aux_loss_coef: float
    use_kl_loss: bool
    init_kl_coef: float
    kl_estimator: str
    kl_target: float | None
    kl_horizon: int
    ema_beta: float
    dynamic_sampling: bool
    dual_clip: float | None
    high_entropy_token_ratio: float
    high_entropy_scope: str
    off_policy_correction: str | None
    correction_low: float | None
    correction_high: float | None
    use_fire: bool
    first_token_temperature: float
    max_num_gen_batches: int
    partial_rollout: bool
    partial_rollout_prompts: int | None
    partial_rollout_tokens: int | None
    max_staleness: int
    use_rollout_logprobs: bool
    best_metric: str | None
    peak_tflops: float | None
    reward_failure: str
    freezing_actor_steps: int
    alarm_kl: float | None
    alarm_entropy: float | None
    alarm_length: float | None
    alarm_reward_std: float | None
    stop_on_alarm: bool
    parity_check_steps: int
    parity_limit: float | None
    micro_batch_tokens: int | None
    max_steps: int | None
    ckpt_path: str | None
    num_episodes: int
    save_steps: int
    eval_steps: int
    logging_steps: int
    max_ckpt_num: int
    max_ckpt_mem: float
    packing_samples: bool
    enable_engine_sleep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Everything a trainer decides by; the meaning of each option is that of `TrainConfig`.

    Raises:
        ValueError: Values that no run accepts; the message lists all of them.
    """

    loss_agg_mode: str = "seq-mean-token-mean"
    seed: int = 42
    sp_size: int = 1
    engine_tp_size: int = 1
    rollout_batch_size: int = 512
    n_samples_per_prompt: int = 8
    train_batch_size: int = 128
    micro_train_batch_size: int = 1
    micro_rollout_batch_size: int = 2
    max_epochs: int = 1
    prompt_max_len: int = 1024
    generate_max_len: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    advantage_estimator: str = "group_norm"
    advantages_norm: bool = False
    advantage_clip: float = 0.0
    reward_clip: float = 0.0
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    overlong_buffer: bool = False
    overlong_buffer_len: int = 1024
    overlong_buffer_penalty_factor: float = 1.0
    gamma: float = 1.0
    lambd: float = 0.95
    policy_loss: str = "ppo"
    cpgd_weighting: str = "std"
    eps_clip: float = 0.2
    eps_clip_low: float | None = None
    eps_clip_high: float | None = None
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    aux_loss_coef: float = 0.0
    use_kl_loss: bool = False
    init_kl_coef: float = 0.01
    kl_estimator: str = "k3"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    ema_beta: float = 0.992
    dynamic_sampling: bool = False
    dual_clip: float | None = None
    high_entropy_token_ratio: float = 0.0
    high_entropy_scope: str = "batch"
    off_policy_correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    use_fire: bool = False
    first_token_temperature: float = 10.0
    max_num_gen_batches: int = 10
    partial_rollout: bool = False
    partial_rollout_prompts: int | None = None
    partial_rollout_tokens: int | None = None
    max_staleness: int = 4
    use_rollout_logprobs: bool = False
    best_metric: str | None = None
    peak_tflops: float | None = None
    reward_failure: str = "raise"
    freezing_actor_steps: int = -1
    alarm_kl: float | None = None
    alarm_entropy: float | None = None
    alarm_length: float | None = None
    alarm_reward_std: float | None = None
    stop_on_alarm: bool = False
    parity_check_steps: int = 0
    parity_limit: float | None = None
    micro_batch_tokens: int | None = None
    max_steps: int | None = None
    ckpt_path: str | None = None
    num_episodes: int = 1
    save_steps: int = -1
    eval_steps: int = -1
    logging_steps: int = 1
    max_ckpt_num: int = 3
    max_ckpt_mem: float = 1e8
    packing_samples: bool = False
    enable_engine_sleep: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1: got {getattr(self, name)}"
            for name in _COUNTS
            if getattr(self, name) < 1
        ]
        problems += trainer_problems(self)
        if problems:
            raise ConfigError("; ".join(problems))

    def check_batches(self, world_size: int) -> None:
        """Checks that the batch sizes fit together on `world_size` ranks.

        Raises:
            ConfigError: They do not; the message has the numbers and the nearest legal values.
        """
        problems = batch_problems(self, world_size)
        if problems:
            raise ConfigError("; ".join(problems))

    def max_micro_tokens(self, micro_batch_size: int) -> int | None:
        """Bound of the tokens of a micro batch; None where rows are counted.

        Packed micro batches hold, by default, what `micro_batch_size` rows of full length would.
        """
        if self.micro_batch_tokens is not None or not self.packing_samples:
            return self.micro_batch_tokens
        return micro_batch_size * (self.prompt_max_len + self.generate_max_len)

    @property
    def num_minibatches(self) -> int:
        """Optimizer batches in which the samples of one step are trained."""
        return self.rollout_batch_size * self.n_samples_per_prompt // self.train_batch_size

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps after each rollout."""
        return self.num_minibatches * self.max_epochs


_COUNTS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "train_batch_size",
    "micro_train_batch_size",
    "micro_rollout_batch_size",
    "max_epochs",
    "sp_size",
    "generate_max_len",
    "num_episodes",
    "logging_steps",
    "max_num_gen_batches",
    "max_staleness",
)
_RUN_OPTIONS = (
    "num_episodes",
    "max_steps",
    "save_steps",
    "eval_steps",
    "ckpt_path",
    "max_ckpt_num",
    "max_ckpt_mem",
)


def resolve_ppo_config(
    keywords: Mapping[str, object],
    config: StrategyConfig,
    *,
    loss_agg_mode: str,
    use_gspo: bool = False,
) -> PPOConfig:
    """Keywords first, then the strategy's configuration with its extras, then the defaults.

    Args:
        keywords: What the caller of the trainer gave.
        config: The strategy's configuration.
        loss_agg_mode: At its default the configuration's value wins.
        use_gspo: The policy loss is gspo.

    Raises:
        TypeError: A keyword is unknown; the message names the nearest known ones.
        ConfigError: Two options name different policy losses.
    """
    names = {field.name for field in fields(PPOConfig)}
    unknown = [name for name in keywords if name not in names]
    if unknown:
        raise TypeError("; ".join(_unknown_keyword(name, names) for name in unknown))
    # None in a configuration means "not given".
    chosen = {
        name: value
        for name, value in configured_values(config).items()
        if name in names and value is not None
    }
    chosen |= keywords
    chosen["policy_loss"] = loss_by_alias(
        use_gspo=use_gspo or bool(configured_values(config).get("use_gspo")),
        use_cpg_loss=bool(configured_values(config).get("use_cpg_loss")),
        policy_loss=str(chosen.get("policy_loss", DEFAULT_POLICY_LOSS)),
    )
    if loss_agg_mode != PPOConfig.__dataclass_fields__["loss_agg_mode"].default:
        chosen["loss_agg_mode"] = loss_agg_mode
    return PPOConfig(**chosen)  # type: ignore[arg-type]


def with_arguments(config: PPOConfig, args: Arguments | None) -> PPOConfig:
    """The options of a run replaced by those that `args` has."""
    if args is None:
        return config
    given = configured_values(StrategyConfig.from_args(args))
    run = {name: given[name] for name in _RUN_OPTIONS if given.get(name) is not None}
    return replace(config, **run)  # type: ignore[arg-type]


def configured_values(config: StrategyConfig) -> dict[str, object]:
    """All fields of a configuration and the arguments it does not know, by name."""
    values = {field.name: config.__dict__[field.name] for field in fields(config)}
    extras = values.pop("extra_args")
    return {**values, **extras} if isinstance(extras, dict) else values


def _unknown_keyword(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
    return f"the trainer has no keyword {name!r}; {hint}"
