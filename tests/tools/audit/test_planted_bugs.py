"""A wrong run is found, and the place in the chain is named."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tools.audit import world
from tests.tools.audit.faults import (
    before_each_step,
    calls,
    fields,
    instead,
    keywords,
    results,
    scaled,
    trained_without,
)

from lightrft.algorithms import corrections, masking
from lightrft.algorithms.advantages import row_level, token_level
from lightrft.algorithms.advantages.row_level import Groups
from lightrft.algorithms.interface import TokenAdvantages, advantage_estimator
from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.algorithms.policy import clipped
from lightrft.config import TrainConfig
from lightrft.experience import delivery, maker
from lightrft.stages.policy import algorithm, objective, policy_stage, updates
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.strategy import backend, model_training, optimizers
from lightrft.strategy.optimizers import AccumulationState
from lightrft.tools.audit.findings import DIFFERS

RUNNING = {"reward_running_norm": True, "reward_running_norm_minus_mean": True}
# Adam's step does not see by how much all rewards are divided, but their mean.
COUNTED = {**RUNNING, "advantage_estimator": "reinforce", "steps": 3}
KL_LOSS = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"}
ONE_BATCH = {"train_batch_size": 16}
GAE = {"advantage_estimator": "gae"}
WHITENED = {"advantage_estimator": "reinforce++"}
TEACHER = {"teacher": "", "teacher_coef": 0.7}


def as_estimator(function):
    return advantage_estimator(needs_groups=True)(function)


def first_id_plus_one(batch):
    ids = batch.token_ids.clone()
    ids[0, 0] += 1
    return ids


def with_other_groups(samples):
    def change(number, item):
        return replace(item, rollout=replace(item.rollout, group_id=number % world.GROUPS))

    return world.with_each(samples, change)


# What the audit names first, options of the run, and what plants the fault.
SAMPLES = {
    "the mask is shifted by one": (
        "response mask",
        {},
        fields(
            delivery, "collate", response_mask=lambda batch: batch.response_mask.roll(-1, dims=1)
        ),
    ),
    "a failed row is trained": (
        "response mask",
        {},
        calls(
            delivery,
            "collate",
            lambda original, table, **how: original(
                replace(table, is_masked=np.zeros_like(table.is_masked)), **how
            ),
        ),
    ),
    "cut responses are trained": (
        "response mask",
        {"mask_truncated": True},
        keywords(delivery, "collate", masks_truncated=False),
    ),
    "tokens are encoded again": (
        "token ids",
        {},
        fields(delivery, "collate", token_ids=first_id_plus_one),
    ),
    "the engine's logprobs are of the next token": (
        "rollout logprobs",
        {},
        fields(
            delivery,
            "collate",
            rollout_logprobs=lambda batch: batch.rollout_logprobs.roll(-1, dims=1),
        ),
    ),
    "an optimizer batch comes twice": (
        "rows that train the actor",
        {"max_epochs": 2},
        instead(updates, "epoch_order", lambda count, **_: (0,) * count),
    ),
    "rows of a group have different prompts": (
        "prompts of groups",
        {"advantage_estimator": "group_norm"},
        results(world, "shaped", with_other_groups),
    ),
}


def with_older_actor(original, batch, models, **how):
    older = copy.deepcopy(models.actor)
    with torch.no_grad():
        older.model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
    return original(batch, replace(models, actor=older), **how)


def with_other_reference(original, batch, models, **how):
    with torch.no_grad():
        models.reference.model.model.norm.weight.mul_(1.05)
    return original(batch, models, **how)


SCORES = {
    "the temperature is left out": (
        "old logprobs",
        {"temperature": 0.7},
        instead(maker, "scoring_temperature", lambda _: 1.0),
    ),
    "old logprobs are of other weights": (
        "old logprobs",
        {},
        calls(maker, "compute_outputs", with_older_actor),
    ),
    "the reference has other weights": (
        "reference logprobs",
        {"init_kl_coef": 0.1},
        calls(maker, "compute_outputs", with_other_reference),
    ),
    "values are of the token itself": (
        "values",
        GAE,
        results(maker, "_evaluate", lambda values: values.roll(1, dims=1)),
    ),
    "the teacher scores the token before": (
        "teacher logprobs",
        {"teacher": ""},
        fields(
            maker,
            "compute_outputs",
            teacher_logprobs=lambda outputs: outputs.teacher_logprobs.roll(1, dims=1),
        ),
    ),
    "the teacher is forgotten": (
        "has a teacher",
        {"teacher": ""},
        fields(maker, "compute_outputs", teacher_logprobs=None),
    ),
}

REWARDS = {
    "overlong responses are rewarded": (
        "rewards",
        {"overlong_buffer": True, "overlong_buffer_len": 5},
        results(world, "overlong_penalty", lambda penalty: lambda length: -penalty(length)),
    ),
    "rewards are clipped below only": (
        "rewards",
        {"reward_clip": 0.5},
        instead(
            maker,
            "clip_rewards",
            lambda rewards, limit: (rewards.clamp(min=-limit), rewards.abs() > limit),
        ),
    ),
    "the running scale divides by n": (
        "rewards",
        {"reward_running_norm": True},
        keywords(row_level.Moments, "std", ddof=0),
    ),
    "moments of rewards are forgotten": (
        "rewards counted before",
        COUNTED,
        fields(PolicyMemory, "after_step", moments=Moments()),
    ),
    "moments of rewards count twice": (
        "rewards counted before",
        COUNTED,
        fields(
            PolicyMemory, "after_step", moments=lambda memory: memory.moments.merge(memory.moments)
        ),
    ),
}


def unshaped_baseline(original, *args, greedy_rewards, **how):
    shaped = original(*args, greedy_rewards=greedy_rewards, **how)
    return replace(shaped, greedy_rewards=greedy_rewards)


def divided_by_n(inputs):
    groups = row_level.build_groups(inputs)
    variance = groups.sum_per_row(groups.centred.square()) / groups.count_per_row
    return groups.where_informative(groups.centred / (variance.sqrt() + 1e-6))


def without_baseline_of_others(name):
    return instead(row_level, name, as_estimator(row_level.group_centred_advantages))


ADVANTAGES = {
    "the baseline is not shaped": (
        "returns",
        {"advantage_estimator": "remax", **RUNNING},
        calls(maker, "shape_rewards", unshaped_baseline),
    ),
    "the std of a group divides by n": (
        "returns",
        {},
        instead(row_level, "group_norm_advantages", as_estimator(divided_by_n)),
    ),
    "leave one out keeps the row": (
        "returns",
        {"advantage_estimator": "rloo"},
        without_baseline_of_others("rloo_advantages"),
    ),
    "the baseline is not weighted by lengths": (
        "returns",
        {"advantage_estimator": "opo"},
        without_baseline_of_others("opo_advantages"),
    ),
    "the failed row enters the mean of its group": (
        "returns",
        {"advantage_estimator": "dr_grpo"},
        instead(Groups, "count_per_row", property(lambda self: torch.full_like(self.rewards, 4.0))),
    ),
    "gamma acts twice": (
        "returns",
        {"gamma": 0.9, "advantage_estimator": "reinforce"},
        keywords(token_level, "discounted_returns", gamma=lambda gamma: gamma**2),
    ),
    "lambda is left out": (
        "returns",
        {**GAE, "lambd": 0.8},
        keywords(token_level, "generalized_advantages", lambd=1.0),
    ),
    "returns are of rewards alone": (
        "returns",
        GAE,
        results(
            token_level,
            "generalized_advantages",
            lambda found: TokenAdvantages(found.advantages, found.advantages),
        ),
    ),
    "the KL reward has the wrong sign": (
        "returns",
        {"init_kl_coef": 0.3, "steps": 2},
        results(maker, "estimate_kl", lambda kl: -kl),
    ),
    "the teacher has the wrong sign": (
        "advantages",
        TEACHER,
        results(maker, "teacher_advantages", lambda advantages: -advantages),
    ),
    "the teacher has another weight": (
        "advantages",
        {**TEACHER, "advantage_estimator": "zero"},
        calls(
            maker,
            "teacher_advantages",
            lambda original, outputs, mask, config: original(
                outputs, mask, replace(config, teacher_coef=1.0)
            ),
        ),
    ),
    "whitening is forgotten": (
        "advantages",
        WHITENED,
        instead(maker, "whiten", lambda advantages, *_: advantages),
    ),
    "whitening divides by n less one": (
        "advantages",
        WHITENED,
        keywords(maker, "whiten", ddof=1),
    ),
}


def with_old_policy(original, old, *args, new_logprobs, **how):
    return original(old, *args, new_logprobs=old, **how)


TOKEN_WEIGHTS = {
    "the correction is capped elsewhere": (
        "token weights",
        {"off_policy_correction": "tis:high=1.1"},
        keywords(
            corrections,
            "correction_weights",
            terms=lambda terms: [replace(term, high=2.0) for term in terms],
        ),
    ),
    "the trust region stays where the policy was": (
        "token weights",
        {
            "off_policy_correction": "reject:k3:token:high=0.001:new/old",
            "max_epochs": 2,
            "also": "gradient norm, actor update 4",
        },
        calls(corrections, "correction_weights", with_old_policy),
    ),
    "the correction is upside down": (
        "token weights",
        {"off_policy_correction": "tis"},
        results(corrections, "masked_difference", lambda difference: -difference),
    ),
    "the most certain tokens are kept": (
        "token weights",
        {"high_entropy_token_ratio": 0.3, "high_entropy_scope": "sequence"},
        calls(
            updates,
            "high_entropy_mask_per_sequence",
            lambda original, values, mask, ratio: original(-values, mask, ratio=ratio),
        ),
    ),
}


def with_width_as_budget(original, mask, mode, max_response_tokens, **how):
    return original(mask, mode, max_response_tokens=mask.shape[1], **how)


def with_bounds_exchanged(original, *args, clip_low, clip_high, **how):
    return original(*args, clip_low=clip_high, clip_high=clip_low, **how)


LOSSES = {
    "padding is counted": (
        "denominator",
        {"policy_loss": "dapo"},
        calls(
            updates,
            "local_normalizer",
            lambda original, mask, *args, **how: original(torch.ones_like(mask), *args, **how),
        ),
    ),
    "empty rows are counted": (
        "denominator",
        {},
        instead(
            updates,
            "local_normalizer",
            lambda mask, *_, **__: torch.tensor(float(len(mask))).double(),
        ),
    ),
    "the budget is the width of the batch": (
        "denominator",
        {"policy_loss": "dr_grpo"},
        calls(updates, "local_normalizer", with_width_as_budget),
    ),
    "a loss has the aggregation of another paper": (
        "denominator",
        {"policy_loss": "reinforce"},
        fields(algorithm, "policy_loss_traits", aggregation="seq-mean-token-mean"),
    ),
    "rows are not divided by their length": (
        "policy loss",
        {},
        instead(objective, "loss_weights", lambda mask, mode, dtype, **_: mask.to(dtype)),
    ),
    "the clip bounds are exchanged": (
        "policy loss",
        {"eps_clip_low": 0.05, "eps_clip_high": 0.3},
        calls(clipped, "clipped_surrogate", with_bounds_exchanged),
    ),
    "the better branch is taken": (
        "policy loss",
        {},
        instead(clipped.torch, "minimum", torch.maximum),
    ),
    "the ratio of a row is a sum": (
        "gradient norm",
        {"policy_loss": "gspo"},
        instead(
            masking,
            "masked_row_mean",
            lambda values, mask: torch.where(mask, values, 0.0).sum(-1),
        ),
    ),
    "the KL loss has the wrong sign": (
        "kl loss",
        {"init_kl_coef": 0.3, "use_kl_loss": True, "kl_estimator": "k1", "steps": 2},
        results(objective, "estimate_kl", lambda kl: -kl),
    ),
    "the KL weight counts twice": (
        "gradient norm",
        {**KL_LOSS, "steps": 2},
        keywords(policy_stage, "PolicyUpdate", kl_coef=lambda coef: 2 * coef),
    ),
    "values are not clipped": (
        "value loss",
        {**GAE, "value_clip": 0.01},
        keywords(updates, "clipped_value_loss", clip=None),
    ),
    # In bfloat16 the first gradient is further off than the format makes it.
    "the entropy has no gradient": (
        "gradient norm, actor update 1",
        {"bf16": True, "entropy_coef": 0.3},
        calls(
            objective.PolicyObjective,
            "terms",
            lambda original, self, tokens, logprobs, entropy: original(
                self, tokens, logprobs, entropy.detach()
            ),
        ),
    ),
}


def half_of_the_last(original, self, ranks):
    return original(self, ranks) * (0.5 if self.is_last() else 1.0)


def without_bias_correction(self, closure=None):
    with torch.no_grad():
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("step", torch.zeros(()))
                state.setdefault("exp_avg", torch.zeros_like(p))
                state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad**2, 1 - beta2)
                size = state["exp_avg_sq"].sqrt() + group["eps"]
                p -= group["lr"] * state["exp_avg"] / size


def all_in_one_group(named, decay):
    return [{"params": [p for _, p in named], "weight_decay": decay}]


def moves_frozen_weights(original, self, optimizer, model):
    norm = original(self, optimizer, model)
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).mul_(1.001)
    return norm


def loses_first_update(patch):
    updates_begun = []

    def step(original, self, *args, **how):
        updates_begun.append(1)
        return None if len(updates_begun) == 1 else original(self, *args, **how)

    calls(torch.optim.AdamW, "step", step)(patch)


def with_coupled_decay(self, module, settings):
    groups = backend.parameter_groups(module.named_parameters(), settings.weight_decay)
    return torch.optim.Adam(groups, lr=settings.lr, betas=settings.betas)


def without_decay(original, self, *args, **how):
    for group in self.param_groups:
        group["weight_decay"] = 0.0
    original(self, *args, **how)


def adam_reads(**changes):
    return fields(model_training.AdamSettings, "read", **changes)


OPTIMIZERS = {
    "a micro batch counts half": (
        "gradient norm",
        {},
        calls(AccumulationState, "loss_scale", half_of_the_last),
    ),
    "gradients are not clipped": (
        "actor exp_avg after",
        {"max_norm": 0.01, **ONE_BATCH},
        instead(backend, "clip_gradients", lambda *_: None),
    ),
    "the schedule is a step ahead": (
        "learning rate",
        {"lr_warmup_ratio": 0.5},
        calls(
            optimizers.LearningRatePlan,
            "__call__",
            lambda original, self, step: original(self, step + 1),
        ),
    ),
    "the peak is another": ("learning rate", {}, adam_reads(lr=lambda settings: 2 * settings.lr)),
    "moments are not corrected": (
        "actor weights after",
        ONE_BATCH,
        instead(torch.optim.AdamW, "step", without_bias_correction),
    ),
    "the betas are others": (
        "betas of the actor",
        {"adam_betas": (0.8, 0.95), **ONE_BATCH},
        keywords(torch.optim.AdamW, "__init__", betas=(0.9, 0.95)),
    ),
    "gains are decayed": (
        "actor weight decay of vectors",
        {"l2": 0.01, **ONE_BATCH},
        instead(backend, "parameter_groups", all_in_one_group),
    ),
    "decay counts twice": (
        "weight_decay of the actor",
        {"l2": 0.01, **ONE_BATCH},
        calls(
            backend,
            "parameter_groups",
            lambda original, named, decay: original(named, 2 * decay),
        ),
    ),
    "decay is left out": (
        "actor weight decay of matrices",
        {"l2": 0.01, "actor_learning_rate": 1e-5, **ONE_BATCH},
        calls(torch.optim.AdamW, "step", without_decay),
    ),
    "decay is coupled": (
        "optimizer of the actor",
        {"l2": 0.01, **ONE_BATCH},
        instead(backend.Backend, "create_optimizer", with_coupled_decay),
    ),
    "frozen weights move": (
        "actor frozen weights",
        {"lora_rank": 2, **ONE_BATCH},
        calls(backend.Backend, "step", moves_frozen_weights),
    ),
    "an update is lost": ("actor weights after", ONE_BATCH, loses_first_update),
    "all parts have one rate": (
        "actor weights",
        {"learning_rate_factors": {"mlp": 0.5}, **ONE_BATCH},
        instead(backend, "with_rate_factors", lambda groups, *_: groups),
    ),
    "attention is not trained": (
        "trained weights of the actor",
        ONE_BATCH,
        trained_without("self_attn"),
    ),
    "the final norm is not trained": (
        "trained weights of the actor",
        ONE_BATCH,
        trained_without("model.norm"),
    ),
    "the eps of Adam is a millionth": ("eps of the actor", {"bf16": True}, adam_reads(eps=1e-6)),
}


def begins_with_twice(original, config, *args, **how):
    return original(replace(config, init_kl_coef=2 * config.init_kl_coef), *args, **how)


def the_other_way(original, self, *args, **how):
    return replace(self, coef=2 * self.coef - original(self, *args, **how).coef)


def advances_twice(original, self, *args):
    original(self, *args)
    if args == () and self.last_epoch > 0:
        original(self)


def alpha_counts_twice(original, self, model, config):
    original(self, model, replace(config, lora_alpha=2 * config.lora_alpha))


# Every formula is right, what it is given is not.
DECISIONS = {
    "the critic is never trained": (
        "updates of the critic",
        GAE,
        instead(updates.PolicyUpdate, "value_step", lambda *_, **__: None),
    ),
    "the actor stays frozen a step longer": (
        "updates of the actor",
        {**GAE, "freezing_actor_steps": 1, "steps": 2},
        keywords(updates.PolicyUpdate, "train", step_number=lambda number: number - 1),
    ),
    "all rows are one optimizer batch": (
        "updates of the actor",
        {},
        keywords(delivery, "plan_minibatches", train_batch_size=16),
    ),
    "optimizer batches are half as large": (
        "updates of the actor",
        {},
        keywords(delivery, "plan_minibatches", train_batch_size=4),
    ),
    "an epoch trains one batch twice and the next the other": (
        "rows that train the actor",
        {"max_epochs": 2},
        instead(updates, "epoch_order", lambda count, *, epoch, **_: (epoch,) * count),
    ),
    "the KL weight begins at twice the option": (
        "KL weight",
        {**KL_LOSS, "steps": 2},
        calls(PolicyMemory, "initial", begins_with_twice),
    ),
    "the KL weight grows without a target": (
        "KL weight",
        {**KL_LOSS, "steps": 2},
        instead(KlController, "update", lambda self, *_, **__: replace(self, coef=1.5 * self.coef)),
    ),
    "the KL controller has the wrong sign": (
        "KL weight",
        {**KL_LOSS, "kl_target": 0.01, "kl_horizon": 50, "steps": 3},
        calls(KlController, "update", the_other_way),
    ),
    "Adam forgets its state": (
        "Adam's steps, actor",
        {"steps": 2},
        before_each_step(lambda main: main.optimizer.state.clear()),
    ),
    "the schedule advances twice": (
        "schedule position, actor",
        {"steps": 2},
        calls(optimizers.PlannedLR, "step", advances_twice),
    ),
    "the schedule forgets the epochs": (
        "schedule length, actor",
        {"max_epochs": 2, "lr_scheduler": "linear", "steps": 2},
        instead(TrainConfig, "steps_per_rollout", property(lambda self: self.num_minibatches)),
    ),
    "adapters count twice": (
        "scale of adapters",
        {"lora_rank": 2, "lora_alpha": 3.0, "steps": 2},
        calls(world.LoraActor, "__init__", alpha_counts_twice),
    ),
    # In later steps the first weights are not at hand: the mean distance of a token tells, too.
    "weights change between sampling and update": (
        "first weights of the actor",
        {"bf16": True, "also": "old logprobs (mean distance)"},
        before_each_step(scaled("", 1.02)),
    ),
}
BUGS = SAMPLES | SCORES | REWARDS | ADVANTAGES | TOKEN_WEIGHTS | LOSSES | OPTIMIZERS | DECISIONS


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found_and_named(name, audited, monkeypatch):
    first, options, plant = BUGS[name]
    options = {"max_epochs": 1, **options}
    steps, also = options.pop("steps", 1), options.pop("also", first)
    plant(monkeypatch)
    report = audited(options, steps=steps)
    assert report.first_difference is not None, "nothing was found"
    assert report.first_difference.quantity.startswith(first)
    assert any(row.quantity.startswith(also) for row in report.rows if row.verdict == DIFFERS)


def test_an_optimizer_s_fault_shows_at_the_next_update(audited, monkeypatch):
    monkeypatch.setattr(backend, "clip_gradients", lambda *_: None)
    first = audited({"max_norm": 0.01, "max_epochs": 1}).first_difference
    assert first.quantity == "logprobs, actor update 2"
    assert "update 1" in first.note
