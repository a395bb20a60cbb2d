"""Options of one part of a run: how rewards of samples become advantages."""

from __future__ import annotations

from dataclasses import dataclass

from lightrft.config.options import (
    algorithm_option,
    rollout_option,
)
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
)


@dataclass(kw_only=True)
class ShapingOptions:
    """How rewards of samples become advantages."""

    micro_rollout_batch_size: int = rollout_option(
        2,
        "Samples per rank in one forward pass before training.",
        at_least=1,
        acts_with="not micro_batch_tokens",
    )
    n_samples_per_prompt: int = rollout_option(
        8,
        "Completions per prompt.",
        at_least=1,
        common=True,
    )
    advantage_estimator: str = algorithm_option(
        "group_norm",
        "Advantage estimator; gae is PPO with a critic.",
        choices=ADVANTAGE_ESTIMATORS,
        common=True,
    )
    use_kl_loss: bool = rollout_option(
        False,
        "Put the KL divergence into the loss instead of the reward.",
    )
    kl_estimator: str | None = rollout_option(
        None,
        "Estimator of the KL divergence; unset is k1 in the reward, where no other is right, and "
        "k3+ in the loss.",
        choices=KL_ESTIMATORS,
        acts_with="init_kl_coef",
    )
    advantages_norm: bool = rollout_option(
        False,
        "Normalise advantages over all ranks.",
    )
    advantage_clip: float = rollout_option(
        0.0,
        "Clip advantages to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_clip: float = rollout_option(
        0.0,
        "Clip rewards to this magnitude; 0 is off.",
        at_least=0,
    )
    reward_running_norm: bool = rollout_option(
        False,
        "Divide rewards by their running standard deviation.",
    )
    reward_running_norm_minus_mean: bool = rollout_option(
        False,
        "Subtract the running mean as well.",
        acts_with="reward_running_norm",
    )
    overlong_buffer: bool = rollout_option(
        False,
        "Punish overlong responses softly.",
    )
    overlong_buffer_len: int = rollout_option(
        1024,
        "Tokens before the limit in which the punishment rises.",
        at_least=1,
        acts_with="overlong_buffer",
    )
    overlong_buffer_penalty_factor: float = rollout_option(
        1.0,
        "Punishment at the limit.",
        at_least=0,
        acts_with="overlong_buffer",
    )
    mask_truncated: bool = rollout_option(
        False,
        "Train on no token of a response that was cut at its limit; its reward still counts in "
        "the baseline of its group.",
    )
    dynamic_sampling: bool = rollout_option(
        False,
        "Draw again for groups whose rewards are all equal.",
    )
