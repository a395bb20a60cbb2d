"""From the options of a trainer to its loss, estimator and sampling; names are checked here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.correction_terms import parse_correction
from lightrft.algorithms.declarations import advantage_traits
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.lookup import lookup
from lightrft.algorithms.registry import (
    build_advantage_estimator,
    build_policy_loss,
    get_policy_loss,
    option_names,
)
from lightrft.engines.truncation import has_known_order
from lightrft.engines.types import SamplingParams
from lightrft.experience.assemble import AdvantageSettings
from lightrft.experience.dynamic import DynamicSampling
from lightrft.experience.partial import PartialRollout
from lightrft.experience.sampling import MakerSettings
from lightrft.experience.scoring import OverlongPenalty
from lightrft.trainer.config_checks import UNKNOWN_ORDER
from lightrft.trainer.ppo_config import PPOConfig
from lightrft.trainer.training.alarms import Alarms
from lightrft.trainer.training.token_weights import TokenWeighting
from lightrft.trainer.training.updates import LossSettings

if TYPE_CHECKING:
    from lightrft.algorithms.types import AdvantageFunction, PolicyLossFunction


def check_algorithm(config: PPOConfig, *, has_critic: bool, has_reference: bool) -> None:
    """Checks all names and what the algorithm needs.

    Raises:
        ValueError: An unknown name (the message lists the known ones), or a model is missing.
    """
    lookup(AGGREGATIONS, config.loss_agg_mode, kind="loss aggregation")
    lookup(KL_ESTIMATORS, config.kl_estimator, kind="KL estimator")
    policy_loss_of(config)
    build_token_weighting(config)
    traits = advantage_traits(build_estimator(config))
    if traits.needs_critic and not has_critic:
        raise ValueError(
            f"advantage_estimator {config.advantage_estimator!r} needs a critic: pass one, or "
            "choose group_norm, rloo, reinforce++ or another estimator without a critic"
        )
    if traits.needs_groups and config.n_samples_per_prompt < 2:
        raise ValueError(
            f"advantage_estimator {config.advantage_estimator!r} compares the samples of one "
            f"prompt: n_samples_per_prompt must be at least 2, got {config.n_samples_per_prompt}"
        )
    if config.use_kl_loss and not has_reference:
        raise ValueError(
            "use_kl_loss needs a reference model: pass initial_model and init_kl_coef > 0, or "
            "leave use_kl_loss out"
        )


def check_replay(config: PPOConfig, engine_name: str | None) -> None:
    """Raises a ValueError if a correction needs the kept tokens of an engine that hides them.

    Args:
        config: The options.
        engine_name: Of the engine that samples; None if there is none yet.
    """
    is_known = has_known_order(engine_name, top_k=config.top_k, top_p=config.top_p)
    if config.off_policy_correction is not None and not is_known:
        raise ValueError(UNKNOWN_ORDER.format(engine=engine_name))


def policy_loss_of(config: PPOConfig) -> PolicyLossFunction:
    """The named loss with its clip bounds.

    `eps_clip_low` and `eps_clip_high` win over `eps_clip`; an `eps_clip` at its default leaves
    the loss the bounds of its paper.
    """
    default = PPOConfig().eps_clip
    symmetric = None if config.eps_clip == default else config.eps_clip
    options = option_names(get_policy_loss(config.policy_loss))
    bounds = {
        "clip_low": symmetric if config.eps_clip_low is None else config.eps_clip_low,
        "clip_high": symmetric if config.eps_clip_high is None else config.eps_clip_high,
    }
    given = {name: value for name, value in bounds.items() if value is not None}
    if config.dual_clip is not None:
        if "dual_clip" not in options:
            raise ValueError(
                f"policy_loss {config.policy_loss!r} has no dual clip: leave out dual_clip"
            )
        given["dual_clip"] = config.dual_clip
    refused = [name for name in given if name not in options]
    if refused:
        raise ValueError(
            f"policy_loss {config.policy_loss!r} has no clip range: leave eps_clip, eps_clip_low "
            f"and eps_clip_high at their defaults (its options are {sorted(options)})"
        )
    return build_policy_loss(config.policy_loss, given)


def alarms_of(config: PPOConfig) -> Alarms:
    """The bounds of a run's metrics."""
    return Alarms(
        max_kl=config.alarm_kl,
        min_entropy=config.alarm_entropy,
        max_length=config.alarm_length,
        min_reward_std=config.alarm_reward_std,
        stops=config.stop_on_alarm,
    )


def build_token_weighting(config: PPOConfig) -> TokenWeighting | None:
    """How tokens are weighed; None where all count alike."""
    if config.high_entropy_token_ratio == 0 and config.off_policy_correction is None:
        return None
    if config.off_policy_correction is not None:
        parse_correction(
            config.off_policy_correction, low=config.correction_low, high=config.correction_high
        )
    return TokenWeighting(
        high_entropy_ratio=config.high_entropy_token_ratio,
        entropy_scope="sequence" if config.high_entropy_scope == "sequence" else "batch",
        correction=config.off_policy_correction,
        correction_low=config.correction_low,
        correction_high=config.correction_high,
    )


def build_estimator(config: PPOConfig) -> AdvantageFunction:
    """The named advantage estimator."""
    options = {"weighting": config.cpgd_weighting} if config.advantage_estimator == "cpgd" else {}
    return build_advantage_estimator(config.advantage_estimator, options)


def loss_settings(config: PPOConfig, *, kl_coef: float) -> LossSettings:
    """What an update minimises when the KL term weighs `kl_coef`."""
    return LossSettings(
        policy_loss=policy_loss_of(config),
        aggregation=config.loss_agg_mode,
        max_response_tokens=config.generate_max_len,
        micro_batch_size=config.micro_train_batch_size,
        kl_loss_coef=kl_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        value_clip=config.value_clip or None,
        weighting=build_token_weighting(config),
        max_micro_tokens=config.max_micro_tokens(config.micro_train_batch_size),
        packs_samples=config.packing_samples,
        aux_loss_coef=config.aux_loss_coef,
    )


def advantage_settings(config: PPOConfig, *, kl_coef: float) -> AdvantageSettings:
    """How rewards become advantages when the KL term weighs `kl_coef`."""
    estimator = build_estimator(config)
    return AdvantageSettings(
        estimator=estimator,
        whitens=advantage_traits(estimator).whitens or config.advantages_norm,
        advantage_clip=config.advantage_clip,
        gamma=config.gamma,
        lambd=config.lambd,
        kl_reward_coef=0.0 if config.use_kl_loss else kl_coef,
        kl_estimator=config.kl_estimator,
    )


def sampling_params(config: PPOConfig) -> SamplingParams:
    """How the responses of training are drawn."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.generate_max_len,
        n=config.n_samples_per_prompt,
        seed=config.seed,
    )


def partial_of(config: PPOConfig) -> PartialRollout | None:
    """How unfinished responses are carried over; None without `partial_rollout`."""
    if not config.partial_rollout:
        return None
    return PartialRollout(
        num_prompts=config.partial_rollout_prompts or -(-3 * config.rollout_batch_size // 2),
        chunk_tokens=config.partial_rollout_tokens or -(-config.generate_max_len // 4),
        max_staleness=config.max_staleness,
    )


def maker_settings(config: PPOConfig, *, pad_token_id: int) -> MakerSettings:
    """How experience is made."""
    penalty = None
    if config.overlong_buffer:
        penalty = OverlongPenalty(
            max_tokens=config.generate_max_len,
            buffer_tokens=config.overlong_buffer_len,
            factor=config.overlong_buffer_penalty_factor,
        )
    return MakerSettings(
        sampling_params=sampling_params(config),
        train_batch_size=config.train_batch_size,
        micro_rollout_batch_size=config.micro_rollout_batch_size,
        pad_token_id=pad_token_id,
        seed=config.seed,
        overlong_penalty=penalty,
        # The trainer releases it, after the last of several generations and as deeply as it can.
        sleep_engine=False,
        masks_reward_failures=config.reward_failure == "mask",
        first_token_temperature=config.first_token_temperature if config.use_fire else None,
        max_micro_tokens=config.max_micro_tokens(config.micro_rollout_batch_size),
        packs_samples=config.packing_samples,
        partial=partial_of(config),
        use_rollout_logprobs=config.use_rollout_logprobs,
        dynamic_sampling=DynamicSampling(config.max_num_gen_batches)
        if config.dynamic_sampling
        else None,
    )
