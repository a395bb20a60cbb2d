"""Rules between the values of a training configuration; each gives lines, not errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.strategy.config import ConfigError
from lightrft.trainer.config_sources import have_splits

if TYPE_CHECKING:
    from lightrft.trainer.config import TrainConfig
    from lightrft.trainer.ppo_config import PPOConfig

GROUP_ESTIMATORS = (
    "group_norm", "grpo", "rloo", "reinforce_baseline", "dr_grpo", "cpgd", "opo",
)  # fmt: skip
LOSSES_WITHOUT_CLIP_RANGE = ("gmpo", "sapo", "reinforce")
LOSSES_WITH_DUAL_CLIP = ("ppo", "clipped", "dapo", "dr_grpo")
DEFAULT_POLICY_LOSS = "ppo"
UNKNOWN_ORDER = (
    "off_policy_correction cannot tell which tokens the {engine} engine kept with top_p and top_k "
    "together: leave one of the two out, or take engine_type vllm or hf"
)
POLICY_LOSS_ALIASES = {"use_gspo": "gspo", "use_cpg_loss": "cpgd"}


def loss_by_alias(*, use_gspo: bool, use_cpg_loss: bool, policy_loss: str) -> str:
    """The policy loss, which a flag may name instead of `policy_loss`.

    Raises:
        ConfigError: Both flags, or a flag and another `policy_loss`.
    """
    flags = [
        name for name, is_set in (("use_gspo", use_gspo), ("use_cpg_loss", use_cpg_loss)) if is_set
    ]
    if not flags:
        return policy_loss
    named = POLICY_LOSS_ALIASES[flags[0]]
    if len(flags) > 1 or policy_loss not in (DEFAULT_POLICY_LOSS, named):
        raise ConfigError(
            f"{' and '.join(flags)} and policy_loss {policy_loss!r} name different policy losses: "
            "give one of them"
        )
    return named


def trainer_problems(config: TrainConfig | PPOConfig) -> list[str]:
    """Values that a trainer cannot work with together, one line each."""
    has_correction = config.off_policy_correction is not None
    low, high = config.correction_low, config.correction_high
    is_truncated = config.top_p < 1 or config.top_k != -1
    rules = (
        (
            has_correction and is_truncated and config.use_fire,
            "off_policy_correction cannot tell which first tokens top_p and top_k left at "
            "first_token_temperature: leave out top_p and top_k, use_fire or the correction",
        ),
        (
            not has_correction and (low is not None or high is not None),
            "correction_low and correction_high need off_policy_correction",
        ),
        (
            low is not None and high is not None and low >= high,
            f"correction_low must be below correction_high: got {low} and {high}",
        ),
        (
            config.high_entropy_scope not in ("batch", "sequence"),
            f"high_entropy_scope: got {config.high_entropy_scope!r}, expected batch or sequence",
        ),
        (
            not 0 <= config.high_entropy_token_ratio <= 1,
            f"high_entropy_token_ratio must lie in [0, 1]: got {config.high_entropy_token_ratio}",
        ),
        (
            config.reward_failure not in ("raise", "mask"),
            f"reward_failure: got {config.reward_failure!r}, expected raise or mask",
        ),
        (
            config.freezing_actor_steps > 0 and config.advantage_estimator != "gae",
            "freezing_actor_steps trains only the critic: it needs advantage_estimator gae, got "
            f"{config.advantage_estimator}",
        ),
        (
            config.dynamic_sampling and config.n_samples_per_prompt < 2,
            "dynamic_sampling compares the samples of one prompt: it needs n_samples_per_prompt "
            f">= 2, got {config.n_samples_per_prompt}",
        ),
        (
            config.use_fire and config.first_token_temperature <= 0,
            f"first_token_temperature must be positive: got {config.first_token_temperature}",
        ),
        (
            config.overlong_buffer and config.overlong_buffer_len > config.generate_max_len,
            "overlong_buffer_len must be at most generate_max_len: got "
            f"{config.overlong_buffer_len} and {config.generate_max_len}",
        ),
        (
            config.micro_batch_tokens is not None and config.micro_batch_tokens < 1,
            f"micro_batch_tokens must be at least 1: got {config.micro_batch_tokens}",
        ),
        (
            config.stop_on_alarm and not has_alarm(config),
            "stop_on_alarm needs a bound: alarm_kl, alarm_entropy, alarm_length or "
            "alarm_reward_std",
        ),
    )
    further = (*_partial_rules(config), *_engine_logprob_rules(config))
    return [text for is_broken, text in (*rules, *further) if is_broken]


def _partial_rules(config: TrainConfig | PPOConfig) -> tuple[tuple[bool, str], ...]:
    prompts = config.rollout_batch_size
    in_flight = config.partial_rollout_prompts
    excluded = {
        "dynamic_sampling": config.dynamic_sampling,
        "use_fire": config.use_fire,
        "advantage_estimator remax": config.advantage_estimator == "remax",
    }
    return (
        *(
            (
                config.partial_rollout and is_set,
                f"partial_rollout and {name} exclude each other: leave one of them out",
            )
            for name, is_set in excluded.items()
        ),
        (
            in_flight is not None and not prompts <= in_flight <= 2 * prompts,
            "partial_rollout_prompts must lie between rollout_batch_size and twice that, or old "
            f"responses could not all be trained on in time: got {in_flight} and {prompts}",
        ),
    )


def _engine_logprob_rules(config: TrainConfig | PPOConfig) -> tuple[tuple[bool, str], ...]:
    needed, truncates = "use_rollout_logprobs", config.top_p < 1 or config.top_k != -1
    corrects = config.off_policy_correction is not None
    excluded = {
        "top_p and top_k: the engine's logprobs then follow another distribution": truncates,
        "use_fire: its first tokens are drawn at another temperature": config.use_fire,
        "off_policy_correction: all its weights would be 1": corrects,
        "high_entropy_token_ratio: it needs a forward pass": config.high_entropy_token_ratio > 0,
    }
    return tuple(
        (config.use_rollout_logprobs and is_set, f"{needed} excludes {text}; leave one of them out")
        for text, is_set in excluded.items()
    )


def has_alarm(config: TrainConfig | PPOConfig) -> bool:
    """Whether any bound of a metric is set."""
    bounds = (
        config.alarm_kl, config.alarm_entropy, config.alarm_length, config.alarm_reward_std,
    )  # fmt: skip
    return any(bound is not None for bound in bounds)


def unused_options(config: TrainConfig) -> list[str]:
    """Options that were changed from their defaults and act in no run like this, one line each."""
    has_critic = config.advantage_estimator == "gae"
    rules = (
        (has_critic, "advantage_estimator gae", ("critic_pretrain", "critic_learning_rate")),
        (has_critic, "advantage_estimator gae", ("value_clip", "lambd")),
        (config.init_kl_coef > 0, "init_kl_coef > 0", ("kl_estimator", "kl_target")),
        (config.kl_target is not None, "kl_target", ("kl_horizon",)),
        (
            config.advantage_estimator == "cpgd",
            "advantage_estimator cpgd",
            ("cpgd_weighting",),
        ),
        (
            config.eval_data is not None,
            "eval_data",
            ("eval_steps", "max_eval_samples", "best_metric"),
        ),
        (
            have_splits(config.prompt_data),
            "a folder or data set in prompt_data",
            ("prompt_split",),
        ),
        (have_splits(config.eval_data), "a folder or data set in eval_data", ("eval_split",)),
        (config.reward_recipe is not None, "reward_recipe", ("reward_recipe_column",)),
        (config.fused_linear_logprob, "fused_linear_logprob", ("chunk_size",)),
        (config.use_fire, "use_fire", ("first_token_temperature",)),
        (config.dynamic_sampling, "dynamic_sampling", ("max_num_gen_batches",)),
        (
            config.partial_rollout,
            "partial_rollout",
            ("partial_rollout_prompts", "partial_rollout_tokens", "max_staleness"),
        ),
        (
            config.high_entropy_token_ratio > 0,
            "high_entropy_token_ratio > 0",
            ("high_entropy_scope",),
        ),
        (config.enable_ema, "enable_ema", ("ema_beta",)),
        (
            config.pretrain_data is not None,
            "pretrain_data",
            ("ptx_coef", "ptx_batch_size", "pretrain_column"),
        ),
        (config.ptx_coef > 0, "ptx_coef > 0", ("pretrain_data",)),
        (config.lora_rank > 0, "lora_rank > 0", ("lora_alpha", "lora_dropout", "target_modules")),
        (
            config.micro_batch_tokens is None,
            "no micro_batch_tokens",
            ("micro_train_batch_size", "micro_rollout_batch_size"),
        ),
        (config.save_trajectories, "save_trajectories", ("num_trajectories_to_save",)),
        (config.parity_check_steps >= 0, "parity_check_steps >= 0", ("parity_limit",)),
    )
    return [
        f"{name} acts only with {needed}"
        for is_used, needed, names in rules
        for name in names
        if not is_used and changed(config, name)
    ]


def changed(config: TrainConfig, *names: str) -> bool:
    """Whether any of the options is not at its default."""
    options = type(config).__dataclass_fields__
    return any(config.__dict__[name] != options[name].default for name in names)
