"""Rules between the values of a whole run's configuration; each gives lines, not errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from operator import eq
from typing import TYPE_CHECKING

from lightrft.engines.truncation import has_known_order
from lightrft.strategy.config import ConfigError
from lightrft.trainer.config_checks import (
    GROUP_ESTIMATORS,
    LOSSES_WITH_DUAL_CLIP,
    LOSSES_WITHOUT_CLIP_RANGE,
    UNKNOWN_ORDER,
    changed,
    loss_by_alias,
    trainer_problems,
)
from lightrft.trainer.config_sources import wrong_probabilities

if TYPE_CHECKING:
    from lightrft.trainer.config import TrainConfig

# The {} right after a letter, as in \\boxed{}, is not the place of the prompt.
PROMPT_SLOT = re.compile(r"(?<![A-Za-z])\{\}")
Rule = tuple[tuple[str, ...], Callable[[], bool], str]
"""The fields it is about, whether they break it, and what to say then."""


def combination_problems(config: TrainConfig, *, wrong_fields: Collection[str]) -> list[str]:
    """Values that are legal alone but not together, one line each.

    Args:
        config: The values.
        wrong_fields: Fields that are wrong by themselves; rules about them are left out.
    """
    rules = (
        *_prompt_rules(config, wrong_fields),
        *_loss_rules(config),
        *_reward_rules(config),
        *_cadence_rules(config),
    )
    found = [
        text
        for names, is_broken, text in rules
        if set(wrong_fields).isdisjoint(names) and is_broken()
    ]
    if not wrong_fields:
        found += trainer_problems(config) + _alias_problems(config)
    return found


def _prompt_rules(config: TrainConfig, wrong_fields: Collection[str]) -> tuple[Rule, ...]:
    estimator, samples = config.advantage_estimator, config.n_samples_per_prompt
    template = config.input_template
    probabilities_do_not_fit = wrong_probabilities(config, wrong_fields)
    return (
        (
            ("advantage_estimator", "n_samples_per_prompt"),
            lambda: estimator in GROUP_ESTIMATORS and samples < 2,
            f"advantage_estimator {estimator} compares the samples of one prompt: it needs "
            f"n_samples_per_prompt >= 2, got {samples}",
        ),
        (
            ("input_template",),
            lambda: template is not None and not PROMPT_SLOT.search(template),
            f"input_template: got {template!r}, expected a text with {{}} where the prompt goes",
        ),
        (
            ("system_prompt", "apply_chat_template"),
            lambda: config.system_prompt is not None and not config.apply_chat_template,
            "system_prompt is part of the chat template: add apply_chat_template",
        ),
        (
            ("prompt_data_probs", "prompt_data"),
            lambda: probabilities_do_not_fit is not None,
            str(probabilities_do_not_fit),
        ),
    )


def _loss_rules(config: TrainConfig) -> tuple[Rule, ...]:
    changed_clip_range = changed(config, "eps_clip", "eps_clip_low", "eps_clip_high")
    return (
        (
            ("use_kl_loss", "init_kl_coef"),
            lambda: config.use_kl_loss and config.init_kl_coef == 0,
            "use_kl_loss needs init_kl_coef > 0: got 0, which loads no reference model",
        ),
        (
            ("policy_loss", "eps_clip", "eps_clip_low", "eps_clip_high"),
            lambda: config.policy_loss in LOSSES_WITHOUT_CLIP_RANGE and changed_clip_range,
            f"policy_loss {config.policy_loss} has no clip range: leave out eps_clip, "
            "eps_clip_low and eps_clip_high",
        ),
        (
            ("policy_loss", "dual_clip"),
            lambda: (
                config.dual_clip is not None and config.policy_loss not in LOSSES_WITH_DUAL_CLIP
            ),
            f"dual_clip is not part of policy_loss {config.policy_loss}: it belongs to "
            f"{', '.join(LOSSES_WITH_DUAL_CLIP)}",
        ),
        (
            ("off_policy_correction", "engine_type", "top_p", "top_k"),
            lambda: (
                config.off_policy_correction is not None
                and not has_known_order(config.engine_type, top_k=config.top_k, top_p=config.top_p)
            ),
            UNKNOWN_ORDER.format(engine=config.engine_type),
        ),
        (
            ("meta_init", "lora_rank"),
            lambda: config.meta_init and config.lora_rank > 0,
            "meta_init fills a model from its files, and adapters are in none: leave out one of "
            "meta_init and lora_rank",
        ),
    )


def _reward_rules(config: TrainConfig) -> tuple[Rule, ...]:
    urls = config.remote_rm_url
    num_urls = 1 if isinstance(urls, str) else _length(urls)
    num_rewards = _length(config.reward_fn) + num_urls + _length(config.reward_pretrain)
    return (
        (
            ("reward_weights", "reward_fn", "remote_rm_url", "reward_pretrain"),
            lambda: len(config.reward_weights) not in (0, num_rewards),
            "reward_weights: got "
            f"{_length(config.reward_weights)} numbers for {num_rewards} rewards; "
            "give one per --reward_fn, then per --remote_rm_url, then per --reward_pretrain",
        ),
        (
            ("reward_weights", "reward_recipe"),
            lambda: bool(config.reward_weights) and config.reward_recipe is not None,
            "reward_recipe gives the weights: leave reward_weights out",
        ),
    )


def _cadence_rules(config: TrainConfig) -> tuple[Rule, ...]:
    return tuple(
        (
            (name,),
            partial(eq, value, 0),
            f"{name}: got 0, expected -1 (off) or a number of at least 1",
        )
        for name, value in (
            ("save_steps", config.save_steps),
            ("eval_steps", config.eval_steps),
            ("top_k", config.top_k),
        )
    )


def _length(value: object) -> int:
    """Of a tuple; other types are reported elsewhere."""
    return len(value) if isinstance(value, tuple) else 0


def _alias_problems(config: TrainConfig) -> list[str]:
    try:
        loss_by_alias(
            use_gspo=config.use_gspo,
            use_cpg_loss=config.use_cpg_loss,
            policy_loss=config.policy_loss,
        )
    except ConfigError as error:
        return [str(error)]
    return []
