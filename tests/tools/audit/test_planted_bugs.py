"""A wrong run is found, and the place in the chain is named.

A wrong formula is at one place. A wrong decision leaves every formula right: most are options that
one part of a run reads otherwise, and all but the links of two steps are found in one step's
record.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.faults import becomes, calls, configured, fields, results, takes
from tests.tools.audit import world

from lightrft.algorithms import masking
from lightrft.algorithms.advantages import row_level, token_level
from lightrft.algorithms.advantages.row_level import Groups
from lightrft.algorithms.interface import TokenAdvantages
from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import moments_of
from lightrft.algorithms.policy import clipped
from lightrft.config import TrainConfig
from lightrft.experience import maker
from lightrft.models import lora
from lightrft.records.batch import select_experience
from lightrft.records.table import row_table
from lightrft.stages.policy import (
    algorithm,
    maker as policy_maker,
    objective,
    policy_stage,
    updates,
)
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.strategy import backend, optimizers, strategy_base
from lightrft.strategy.optimizers import AccumulationState
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.record import recorded_steps, step_folder
from lightrft.tools.audit.report import audit_step

# Relative to the right change of the weights.
MIN_EFFECT = 1e-3
CRITIC = {"advantage_estimator": "gae"}
KL_LOSS = {"init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "k2"}
KL_REWARD = {"init_kl_coef": 0.2, "kl_estimator": "k1", "advantage_estimator": "reinforce++"}
KL_TARGET = {"kl_target": 1e-4, "kl_horizon": 20}
RUNNING = {"reward_running_norm": True, "reward_running_norm_minus_mean": True}
# Adam's step does not see by how much all rewards are divided, but their mean.
COUNTED = {**RUNNING, "advantage_estimator": "reinforce"}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 3.0}
TEACHER = {"teacher": "", "teacher_coef": 0.7}
ONE_UPDATE = {"train_batch_size": 16}


@dataclass(frozen=True)
class Fault:
    """A fault and the run that it acts in.

    Args:
        first: Begins the name of what the audit names first.
        plant: Plants it.
        options: Of the run.
        steps: The last one is audited.
        is_linked: Found by what two steps have in common.
        also: Begins the name of something else that differs.
    """

    first: str
    plant: object
    options: dict
    steps: int = 1
    is_linked: bool = False
    also: str = ""


def fault(first, plant, *, steps=1, is_linked=False, also="", **options):
    return Fault(first, plant, {"max_epochs": 1, **options}, steps, is_linked, also)


def next_token(values):
    return values.roll(-1, dims=1)


def token_before(values):
    return values.roll(1, dims=1)


def first_id_raised(token_ids):
    changed = token_ids.clone()
    changed[0, 0] += 1
    return changed


def negative(original, *args, **kwargs):
    return -original(*args, **kwargs)


# --- formulas


def no_row_failed(original, table, **kwargs):
    return original(replace(table, is_masked=np.zeros_like(table.is_masked)), **kwargs)


def with_stale_actor(original, batch, models, **kwargs):
    stale = copy.deepcopy(models.actor)
    with torch.no_grad():
        stale.model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
    return original(batch, replace(models, actor=stale), **kwargs)


def with_changed_reference(original, batch, models, **kwargs):
    with torch.no_grad():
        models.reference.model.model.norm.weight.mul_(1.05)
    return original(batch, models, **kwargs)


def clipped_below(original, rewards, limit):
    return rewards.clamp(min=-limit), rewards.abs() > limit


def baseline_stays(original, *args, greedy_rewards, **kwargs):
    shaped = original(*args, greedy_rewards=greedy_rewards, **kwargs)
    return replace(shaped, greedy_rewards=greedy_rewards)


def of_rewards_alone(advantages):
    return TokenAdvantages(advantages.advantages, advantages.advantages)


def capped_elsewhere(original, *args, terms, **kwargs):
    return original(*args, terms=[replace(t, high=2.0) for t in terms], **kwargs)


def never_new(original, old, *args, new_logprobs, **kwargs):
    return original(old, *args, new_logprobs=old, **kwargs)


def bounds_exchanged(original, *args, clip_low, clip_high, **kwargs):
    return original(*args, clip_low=clip_high, clip_high=clip_low, **kwargs)


def half_in_the_end(original, self, ranks):
    return original(self, ranks) * (0.5 if self.is_last() else 1.0)


def uncorrected(self, closure=None):
    """AdamW's step without the correction of its moments."""
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
                p -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])


def moves_what_is_frozen(original, self, optimizer, model):
    norm = original(self, optimizer, model)
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).mul_(1.001)
    return norm


def loses_an_update(patch):
    counted = []

    def step(original, *args, **kwargs):
        counted.append(1)
        return None if len(counted) == 1 else original(*args, **kwargs)

    calls(torch.optim.AdamW, "step", step)(patch)


def rates_twice(original, kwargs, config):
    return original({**kwargs, "lr": 2 * kwargs["lr"]}, config)


FORMULAS = {
    "the mask is shifted by one": fault(
        "response mask", results(maker, "collate", fields(response_mask=next_token))
    ),
    "a failed row is trained": fault("response mask", calls(maker, "collate", no_row_failed)),
    "cut responses are trained": fault(
        "response mask", takes(maker, "collate", masks_truncated=False), mask_truncated=True
    ),
    "tokens are encoded again": fault(
        "token ids", results(maker, "collate", fields(token_ids=first_id_raised))
    ),
    "engine logprobs are of the next token": fault(
        "rollout logprobs", results(maker, "collate", fields(rollout_logprobs=next_token))
    ),
    "temperature is left out": fault(
        "old logprobs", results(maker, "scoring_temperature", lambda _: 1.0), temperature=0.7
    ),
    "old logprobs are of other weights": fault(
        "old logprobs", calls(maker, "compute_outputs", with_stale_actor)
    ),
    "the reference has other weights": fault(
        "reference logprobs",
        calls(maker, "compute_outputs", with_changed_reference),
        init_kl_coef=0.1,
    ),
    "values are of the token itself": fault(
        "values", results(maker, "_evaluate", token_before), **CRITIC
    ),
    "overlong responses are rewarded": fault(
        "rewards",
        results(world, "overlong_penalty", lambda penalty: lambda length: -penalty(length)),
        overlong_buffer=True,
        overlong_buffer_len=5,
    ),
    "rewards are clipped below only": fault(
        "rewards", calls(maker, "clip_rewards", clipped_below), reward_clip=0.5
    ),
    "the running scale divides by n": fault(
        "rewards", takes(row_level.Moments, "std", ddof=0), reward_running_norm=True
    ),
    "the baseline is not shaped": fault(
        "returns",
        calls(maker, "shape_rewards", baseline_stays),
        advantage_estimator="remax",
        **RUNNING,
    ),
    "the failed row enters the group's mean": fault(
        "returns",
        becomes(Groups, "count_per_row", property(lambda self: torch.full_like(self.rewards, 4.0))),
        advantage_estimator="dr_grpo",
    ),
    "lambda is left out": fault(
        "returns", takes(token_level, "generalized_advantages", lambd=1.0), lambd=0.8, **CRITIC
    ),
    "returns are of rewards alone": fault(
        "returns", results(token_level, "generalized_advantages", of_rewards_alone), **CRITIC
    ),
    "the KL reward has the wrong sign": fault(
        "returns", calls(maker, "estimate_kl", negative), init_kl_coef=0.3, steps=2
    ),
    "the teacher has the wrong sign": fault(
        "advantages", calls(maker, "teacher_advantages", negative), **TEACHER
    ),
    "the teacher has another weight": fault(
        "advantages",
        calls(
            maker,
            "teacher_advantages",
            lambda o, outputs, mask, config: o(outputs, mask, replace(config, teacher_coef=1.0)),
        ),
        advantage_estimator="zero",
        **TEACHER,
    ),
    "the teacher scores the token before": fault(
        "teacher logprobs",
        results(maker, "compute_outputs", fields(teacher_logprobs=token_before)),
        teacher="",
    ),
    "the teacher is forgotten": fault(
        "has a teacher",
        results(maker, "compute_outputs", fields(teacher_logprobs=lambda _: None)),
        teacher="",
    ),
    "whitening divides by n less one": fault(
        "advantages", takes(maker, "whiten", ddof=1), advantage_estimator="reinforce++"
    ),
    "the correction is capped elsewhere": fault(
        "token weights",
        calls(updates, "correction_weights", capped_elsewhere),
        off_policy_correction="tis:high=1.1",
    ),
    "the trust region stays where the policy was": fault(
        "token weights",
        calls(updates, "correction_weights", never_new),
        off_policy_correction="reject:k3:token:high=0.001:new/old",
        max_epochs=2,
    ),
    "the most certain tokens are kept": fault(
        "token weights",
        calls(
            updates,
            "high_entropy_mask_per_sequence",
            lambda o, v, mask, ratio: o(-v, mask, ratio=ratio),
        ),
        high_entropy_token_ratio=0.3,
        high_entropy_scope="sequence",
    ),
    "empty rows are counted": fault(
        "denominator",
        calls(
            updates, "local_normalizer", lambda o, m, *_, **__: torch.tensor(1.0 * len(m)).double()
        ),
    ),
    "a loss has the aggregation of another paper": fault(
        "denominator",
        results(
            algorithm, "policy_loss_traits", fields(aggregation=lambda _: "seq-mean-token-mean")
        ),
        policy_loss="reinforce",
    ),
    "rows are not divided by their length": fault(
        "policy loss",
        calls(objective, "loss_weights", lambda o, mask, mode, dtype, **_: mask.to(dtype)),
    ),
    "the clip bounds are exchanged": fault(
        "policy loss",
        calls(clipped, "clipped_surrogate", bounds_exchanged),
        eps_clip_low=0.05,
        eps_clip_high=0.3,
    ),
    "the ratio of a row is a sum": fault(
        "gradient norm",
        calls(masking, "masked_row_mean", lambda o, v, mask: torch.where(mask, v, 0.0).sum(-1)),
        policy_loss="gspo",
    ),
    "the KL loss has the wrong sign": fault(
        "kl loss", calls(objective, "estimate_kl", negative), **KL_LOSS, steps=2
    ),
    "the KL weight counts twice": fault(
        "gradient norm",
        calls(policy_stage, "Update", lambda o, *a, kl_coef, **k: o(*a, kl_coef=2 * kl_coef, **k)),
        **KL_LOSS,
        steps=2,
    ),
    "values are not clipped": fault(
        "value loss", takes(updates, "clipped_value_loss", clip=None), **CRITIC, value_clip=0.01
    ),
    "a micro batch counts half": fault(
        "gradient norm", calls(AccumulationState, "loss_scale", half_in_the_end)
    ),
    "gradients are not clipped": fault(
        "actor exp_avg after",
        becomes(backend, "clip_gradients", lambda *_: None),
        max_norm=0.01,
        **ONE_UPDATE,
    ),
    "the schedule is a step ahead": fault(
        "learning rate",
        calls(optimizers.LearningRatePlan, "__call__", lambda o, self, step: o(self, step + 1)),
        lr_warmup_ratio=0.5,
    ),
    "the peak is another": fault(
        "learning rate", calls(strategy_base.AdamSettings, "read", rates_twice)
    ),
    "moments are not corrected": fault(
        "actor weights after", becomes(torch.optim.AdamW, "step", uncorrected), **ONE_UPDATE
    ),
    "gains are decayed": fault(
        "actor weight decay of vectors",
        calls(
            backend,
            "parameter_groups",
            lambda o, named, decay: [{"params": [p for _, p in named], "weight_decay": decay}],
        ),
        l2=0.01,
        **ONE_UPDATE,
    ),
    "decay counts twice": fault(
        "actor weight decay of matrices",
        calls(backend, "parameter_groups", lambda o, named, decay: o(named, 2 * decay)),
        l2=0.01,
        **ONE_UPDATE,
    ),
    "frozen weights move": fault(
        "actor frozen weights",
        calls(backend.Backend, "step", moves_what_is_frozen),
        lora_rank=2,
        **ONE_UPDATE,
    ),
    "an update is lost": fault("actor weights after", loses_an_update, **ONE_UPDATE),
}


# --- decisions


def update_reads(**options):
    """Let the update read other options."""
    return calls(
        policy_stage, "Update", lambda o, config, *a, **k: o(configured(config, options), *a, **k)
    )


def experience_reads(**options):
    """Let rewards, advantages and optimizer batches follow other options."""
    return calls(
        policy_maker,
        "make_experience",
        lambda o, *a, settings, **k: o(
            *a, settings=replace(settings, config=configured(settings.config, options)), **k
        ),
    )


def strategy_reads(**options):
    """Let optimizers, schedules and clipping follow other options."""

    def change(strategy):
        strategy.config.__dict__.update(options)
        return strategy

    return results(world, "get_fake_strategy", change)


def memory_reads(**options):
    """Let the weight of the KL term follow other options."""
    return calls(
        PolicyMemory, "initial", lambda o, config, *a, **k: o(configured(config, options), *a, **k)
    )


def optimizer_is(change):
    """Change the optimizer of every model when it is made."""

    def create(original, self, module, settings):
        return change(original(self, module, settings), module)

    return calls(backend.Backend, "create_optimizer", create)


def lacks(part):
    """Let optimizers take no parameter whose name holds the part."""
    return calls(
        backend,
        "parameter_groups",
        lambda o, named, decay: o([(n, p) for n, p in named if part not in n], decay),
    )


def begins_with(change):
    """Do something to the trained models before each step's states are recorded."""

    def observer(original, self, *args):
        change(self.models)
        return original(self, *args)

    return calls(policy_stage.PolicyStage, "observe_step", observer)


def scaled_by(factor):
    def change(models):
        with torch.no_grad():
            for parameter in models.main.model.parameters():
                parameter.mul_(factor)

    return begins_with(change)


def frozen_longer(original, self, *args, step_number, **kwargs):
    return original(self, *args, step_number=step_number - 1, **kwargs)


def learns_once(original, self, batch, trained, **kwargs):
    if all(update.model != trained.name for update in self.observer.updates):
        original(self, batch, trained, **kwargs)


def in_given_order(original, lengths, *, train_batch_size, **kwargs):
    batches = np.arange(len(lengths)).reshape(-1, train_batch_size)
    return maker.MinibatchPlan(tuple((tuple(map(int, batch)),) for batch in batches))


def with_own_rows(original, self, batch, *args, **kwargs):
    """Train half of the rows in each update; Z is theirs."""
    half = select_experience(batch, slice(0, len(batch.advantages) // 2))
    original(self, half, *args, **{**kwargs, "slices": ()})


def in_one_slice(original, self, batch, *args, slices, **kwargs):
    original(self, batch, *args, slices=[slice(0, len(batch.advantages))], **kwargs)


def away_from_the_target(original, self, *args, **kwargs):
    return replace(self, coef=2 * self.coef - original(self, *args, **kwargs).coef)


def with_moments(change):
    """Remember other rewards: a function of the moments before, those after, and the step."""

    def after(original, self, batch, **kwargs):
        memory = original(self, batch, **kwargs)
        moments = change(self.moments, memory.moments, batch.experience)
        return replace(memory, moments=moments)

    return calls(PolicyMemory, "after_step", after)


def twice_in_later_steps(original, self, *args):
    original(self, *args)
    if args == () and self.last_epoch > 0:
        original(self)


def coupled_adam(self, module, settings):
    groups = backend.parameter_groups(module.named_parameters(), settings.weight_decay)
    return torch.optim.Adam(groups, lr=settings.lr, betas=settings.betas)


def twice_as_fast(optimizer, module):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if group["weight_decay"] else 2 * group["lr"]
    return optimizer


def amsgrad(optimizer, module):
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    return optimizer


def new_each_time(original, self, *args, **kwargs):
    for state in self.state.values():
        state.clear()
    return original(self, *args, **kwargs)


def with_doubled_scale(original, self, model, config):
    original(self, model, replace(config, lora_alpha=2 * config.lora_alpha))


def with_mixed_groups(samples):
    scored = [
        replace(item, rollout=replace(item.rollout, group_id=number % world.GROUPS))
        for number, item in enumerate(samples.scored)
    ]
    return replace(samples, scored=scored, table=row_table(scored))


def follows_the_policy(original, batch, models, **kwargs):
    return original(batch, replace(models, reference=models.actor), **kwargs)


def renewed(original, self, batch, actor, **kwargs):
    outputs = replace(batch.outputs, old_logprobs=None)
    original(self, replace(batch, outputs=outputs), actor, **kwargs)


def rounds(original, self, batch, metrics):
    with torch.no_grad():
        for parameter in self.models.main.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return original(self, batch, metrics)


def without_gradient(original, self, tokens, logprobs, entropy):
    return original(self, tokens, logprobs, entropy.detach())


DECISIONS = {
    "the critic is never trained": fault(
        "updates of the critic",
        becomes(updates.Update, "value_step", lambda *_, **__: None),
        **CRITIC,
    ),
    "the actor stays frozen a step longer": fault(
        "updates of the actor",
        calls(updates.Update, "train", frozen_longer),
        freezing_actor_steps=1,
        steps=2,
        **CRITIC,
    ),
    "optimizer batches are half as large": fault(
        "updates of the actor", takes(maker, "plan_minibatches", train_batch_size=4)
    ),
    "an epoch trains one batch twice and the next the other": fault(
        "rows that train the actor",
        calls(updates, "epoch_order", lambda o, count, *, epoch, **_: (epoch,) * count),
        max_epochs=2,
    ),
    "batches of whole groups": fault(
        "optimizer batches of the actor", calls(maker, "plan_minibatches", in_given_order)
    ),
    "one epoch of two": fault("updates of the actor", update_reads(max_epochs=1), max_epochs=2),
    "the KL weight begins at twice the option": fault(
        "KL weight", memory_reads(init_kl_coef=0.4), **KL_LOSS, steps=2
    ),
    "the KL weight follows a target that there is not": fault(
        "KL weight", memory_reads(**KL_TARGET), **KL_REWARD, steps=3
    ),
    "the KL controller has the wrong sign": fault(
        "KL weight",
        calls(KlController, "update", away_from_the_target),
        **KL_LOSS,
        kl_target=0.01,
        kl_horizon=50,
        steps=3,
        is_linked=True,
    ),
    "reward moments count twice": fault(
        "rewards counted before",
        with_moments(lambda _, after, __: after.merge(after)),
        **COUNTED,
        steps=3,
        is_linked=True,
    ),
    "moments of the last step alone": fault(
        "rewards counted before",
        with_moments(lambda *moments: moments_of(moments[-1].rewards.rewards)),
        **COUNTED,
        steps=3,
    ),
    "advantages are whitened": fault(
        "advantages", experience_reads(advantages_norm=True), advantage_estimator="dr_grpo"
    ),
    "Adam forgets its state": fault(
        "Adam's steps, actor",
        begins_with(lambda models: models.main.optimizer.state.clear()),
        steps=2,
        is_linked=True,
    ),
    "the schedule advances twice": fault(
        "schedule position, actor",
        calls(optimizers.PlannedLR, "step", twice_in_later_steps),
        steps=2,
    ),
    "the schedule forgets the epochs": fault(
        "schedule length, actor",
        becomes(TrainConfig, "steps_per_rollout", property(lambda self: self.num_minibatches)),
        max_epochs=2,
        lr_scheduler="linear",
        steps=2,
    ),
    "other betas": fault("betas of the actor", strategy_reads(adam_betas=(0.9, 0.999))),
    "decay is coupled": fault(
        "optimizer of the actor",
        becomes(backend.Backend, "create_optimizer", coupled_adam),
        l2=0.01,
        **ONE_UPDATE,
    ),
    "all parts have one rate": fault(
        "actor weights",
        becomes(backend, "with_rate_factors", lambda groups, *_: groups),
        learning_rate_factors={"mlp": 0.5},
        **ONE_UPDATE,
    ),
    "the largest second moment": fault("", optimizer_is(amsgrad), steps=2),
    "attention is not trained": fault(
        "trained weights of the actor", lacks("self_attn"), **ONE_UPDATE
    ),
    "adapters of queries alone": fault(
        "trained weights of the actor",
        results(lora, "target_layers", lambda names: [n for n in names if "q_proj" in n]),
        **ADAPTERS,
    ),
    "adapters count twice": fault(
        "scale of adapters",
        calls(world.LoraActor, "__init__", with_doubled_scale),
        **ADAPTERS,
        steps=2,
    ),
    "rows of a group have different prompts": fault(
        "prompts of groups", results(world, "shaped", with_mixed_groups)
    ),
    "weights change between two steps": fault("", scaled_by(1.01), steps=2),
    # In bfloat16 the largest distance of a token says little.
    "the entropy has no gradient": fault(
        "gradient norm, actor update 1",
        calls(objective.PolicyObjective, "terms", without_gradient),
        bf16=True,
        entropy_coef=0.3,
    ),
    # In later steps the first weights are not at hand.
    "weights change between sampling and update": fault(
        "first weights of the actor",
        scaled_by(1.02),
        bf16=True,
        also="old logprobs (mean distance)",
    ),
    "the eps of Adam is a millionth": fault(
        "eps of the actor",
        results(strategy_base.AdamSettings, "read", fields(eps=lambda _: 1e-6)),
        bf16=True,
    ),
}
MORE_DECISIONS = {
    "a bonus for entropy": fault("", update_reads(entropy_coef=0.1)),
    "tokens of the batch, not of each row": fault(
        "",
        update_reads(high_entropy_scope="batch"),
        high_entropy_token_ratio=0.3,
        high_entropy_scope="sequence",
    ),
    "a KL term of another estimator": fault(
        "", update_reads(kl_estimator="abs"), **KL_LOSS, steps=2
    ),
    "the running mean stays in": fault(
        "", experience_reads(reward_running_norm_minus_mean=False), **COUNTED
    ),
    "old logprobs of the actor": fault(
        "", experience_reads(use_rollout_logprobs=False), use_rollout_logprobs=True
    ),
    "old logprobs of the engine": fault("", experience_reads(use_rollout_logprobs=True)),
    "another seed of the batches": fault("", experience_reads(seed=4)),
    "turns discounted by token": fault(
        "",
        experience_reads(turn_credit="last"),
        gamma=0.5,
        turn_credit="discounted",
        advantage_estimator="reinforce++",
    ),
    "another rate of the critic": fault("", strategy_reads(critic_learning_rate=2e-3), **CRITIC),
    "a constant rate": fault("", strategy_reads(lr_scheduler="constant"), lr_scheduler="linear"),
    "a KL weight of another horizon": fault(
        "", memory_reads(kl_horizon=80), **KL_REWARD, **KL_TARGET, steps=3, is_linked=True
    ),
    "a KL controller of half the rows": fault(
        "",
        calls(
            KlController, "update", lambda o, *a, num_samples: o(*a, num_samples=num_samples / 2)
        ),
        **KL_REWARD,
        **KL_TARGET,
        steps=3,
        is_linked=True,
    ),
    "the last batch is left out": fault(
        "", results(updates, "epoch_order", lambda order: order[:-1])
    ),
    "the actor learns once": fault("", calls(updates.Update, "policy_step", learns_once)),
    "every step has the batches of the first": fault(
        "", takes(maker, "plan_minibatches", step=0), steps=2
    ),
    "half of each batch": fault("", calls(updates.Update, "policy_step", with_own_rows)),
    "a micro batch of all rows": fault(
        "",
        calls(updates.Update, "policy_step", in_one_slice),
        policy_loss="kl_cov",
        policy_loss_args={"cov_ratio": 0.3},
    ),
    "the embedding is not trained": fault("", lacks("embed_tokens")),
    "the critic's trunk is not trained": fault("", lacks("trunk"), **CRITIC),
    "second factors alone are trained": fault("", lacks("lora_A"), **ADAPTERS),
    "vectors learn twice as fast": fault("", optimizer_is(twice_as_fast), l2=0.01),
    "moments of one update": fault("", calls(torch.optim.AdamW, "step", new_each_time)),
    "gradients of the update before": fault(
        "", becomes(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None)
    ),
    "rewards of the row before": fault(
        "", results(maker, "shape_rewards", fields(rewards=lambda rewards: rewards.roll(1)))
    ),
    "a reference that follows the policy": fault(
        "", calls(maker, "compute_outputs", follows_the_policy), **KL_REWARD, steps=2
    ),
    "old logprobs of each update": fault(
        "", calls(updates.Update, "policy_step", renewed), eps_clip=0.02
    ),
    "moments of shaped rewards": fault(
        "",
        with_moments(lambda before, _, step: before.merge(moments_of(step.rewards.rewards))),
        **COUNTED,
        steps=2,
        is_linked=True,
    ),
    "weights that are rounded between two steps": fault(
        "",
        calls(policy_stage.PolicyStage, "finish", rounds),
        steps=2,
        is_linked=True,
        actor_learning_rate=1e-3,
    ),
    "bfloat16": fault("", strategy_reads(bf16=True)),
}
FAULTS = FORMULAS | DECISIONS | MORE_DECISIONS


def how(planted):
    """Return further arguments of a record."""
    shape = world.with_observations if "turn_credit" in planted.options else None
    return {"steps": planted.steps, "shape": shape}


def assert_named(planted, run):
    """Check that the audit of the last step names the fault, in most cases without the others."""
    for step in recorded_steps(run)[:-1] if not planted.is_linked else ():
        shutil.rmtree(step_folder(run, step))
    report = audit_step(run)
    assert report.first_difference is not None, "nothing was found"
    assert report.first_difference.quantity.startswith(planted.first)
    different = [row.quantity for row in report.rows if row.verdict == DIFFERS]
    assert any(name.startswith(planted.also) for name in different)


@pytest.mark.parametrize("name", FORMULAS | DECISIONS)
def test_a_fault_is_found_and_named(name, micro_model, micro_teacher, tmp_path, monkeypatch):
    planted = FAULTS[name]
    planted.plant(monkeypatch)
    options = world.with_teacher(planted.options, micro_teacher)
    world.record_step(micro_model, tmp_path, options, **how(planted))
    assert_named(planted, tmp_path)


@pytest.mark.slow
@pytest.mark.shard("audit_decisions")
@pytest.mark.parametrize("name", DECISIONS | MORE_DECISIONS)
def test_a_wrong_decision_changes_the_weights_and_is_found(
    name, micro_model, tmp_path, monkeypatch
):
    planted = FAULTS[name]
    effect = world.effect_of(
        lambda: planted.plant(monkeypatch), micro_model, tmp_path, planted.options, **how(planted)
    )
    assert effect > MIN_EFFECT
    assert_named(planted, tmp_path / "wrong")


def test_a_fault_of_an_optimizer_shows_at_the_next_update(audited, monkeypatch):
    FORMULAS["gradients are not clipped"].plant(monkeypatch)
    first = audited({"max_norm": 0.01, "max_epochs": 1}).first_difference
    assert first.quantity == "logprobs, actor update 2"
    assert "update 1" in first.note
