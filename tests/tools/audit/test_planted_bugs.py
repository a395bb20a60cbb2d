"""A wrong run is found, and the place in the chain is named."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightrft.algorithms import corrections
from lightrft.algorithms.advantages import row_level, token_level
from lightrft.algorithms.advantages.row_level import Groups
from lightrft.algorithms.interface import TokenAdvantages, advantage_estimator
from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.algorithms.policy import clipped
from lightrft.config import TrainConfig
from lightrft.experience import maker
from lightrft.records.table import row_table
from lightrft.stages.policy import algorithm, objective, policy_stage, updates
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.strategy import backend, model_training, optimizers
from lightrft.strategy.optimizers import AccumulationState
from lightrft.tools.audit.findings import DIFFERS

BUGS = {}
RUNNING = {"reward_running_norm": True, "reward_running_norm_minus_mean": True}


def bug(first, **how):
    """Registers a bug: what the audit names first, options of the run, and what plants it."""

    def add(plant):
        BUGS[plant.__name__] = (first, how, plant)
        return plant

    return add


def wrap(patch, owner, name, change):
    """Replaces owner.name by change(original)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(original)(change(original)))


# --- samples and masks


@bug("response mask")
def mask_is_shifted_by_one(patch):
    def change(original):
        def collate_(*args, **kwargs):
            batch = original(*args, **kwargs)
            return replace(batch, response_mask=batch.response_mask.roll(-1, dims=1))

        return collate_

    wrap(patch, maker, "collate", change)


@bug("response mask")
def a_failed_row_is_trained(patch):
    def change(original):
        return lambda table, **kwargs: original(
            replace(table, is_masked=np.zeros_like(table.is_masked)), **kwargs
        )

    wrap(patch, maker, "collate", change)


@bug("token ids")
def tokens_are_encoded_again(patch):
    def change(original):
        def collate_(*args, **kwargs):
            batch = original(*args, **kwargs)
            ids = batch.token_ids.clone()
            ids[0, 0] += 1
            return replace(batch, token_ids=ids)

        return collate_

    wrap(patch, maker, "collate", change)


@bug("rollout logprobs")
def engine_logprobs_are_of_the_next_token(patch):
    def change(original):
        def collate_(*args, **kwargs):
            batch = original(*args, **kwargs)
            return replace(batch, rollout_logprobs=batch.rollout_logprobs.roll(-1, dims=1))

        return collate_

    wrap(patch, maker, "collate", change)


@bug("rows that train the actor", max_epochs=2)
def an_optimizer_batch_comes_twice(patch):
    wrap(patch, updates, "epoch_order", lambda _: lambda count, **__: (0,) * count)


# --- scoring


@bug("old logprobs", temperature=0.7)
def temperature_is_left_out(patch):
    wrap(patch, maker, "scoring_temperature", lambda _: lambda __: 1.0)


@bug("old logprobs")
def old_logprobs_are_of_other_weights(patch):
    def change(original):
        def compute(batch, models, **kwargs):
            stale = copy.deepcopy(models.actor)
            with torch.no_grad():
                stale.model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
            return original(batch, replace(models, actor=stale), **kwargs)

        return compute

    wrap(patch, maker, "compute_outputs", change)


@bug("reference logprobs", init_kl_coef=0.1)
def the_reference_has_other_weights(patch):
    def change(original):
        def compute(batch, models, **kwargs):
            with torch.no_grad():
                models.reference.model.model.norm.weight.mul_(1.05)
            return original(batch, models, **kwargs)

        return compute

    wrap(patch, maker, "compute_outputs", change)


@bug("values", advantage_estimator="gae")
def values_are_of_the_token_itself(patch):
    def change(original):
        def evaluate(*args, **kwargs):
            return original(*args, **kwargs).roll(1, dims=1)

        return evaluate

    wrap(patch, maker, "_evaluate", change)


@bug("response mask", mask_truncated=True)
def cut_responses_are_trained(patch):
    def change(original):
        return lambda *args, **kwargs: original(*args, **kwargs | {"masks_truncated": False})

    wrap(patch, maker, "collate", change)


# --- rewards


@bug("rewards", overlong_buffer=True, overlong_buffer_len=5)
def overlong_responses_are_rewarded(patch, world):
    wrap(
        patch,
        world,
        "overlong_penalty",
        lambda original: lambda config: lambda length: -original(config)(length),
    )


@bug("rewards", reward_clip=0.5)
def rewards_are_clipped_below_only(patch):
    wrap(
        patch,
        maker,
        "clip_rewards",
        lambda _: lambda rewards, limit: (rewards.clamp(min=-limit), rewards.abs() > limit),
    )


@bug("rewards", reward_running_norm=True)
def running_scale_divides_by_n(patch):
    wrap(
        patch,
        row_level.Moments,
        "std",
        lambda original: lambda self, *, ddof, **k: original(self, ddof=0, **k),
    )


# --- advantages


@bug("returns", advantage_estimator="remax", **RUNNING)
def the_baseline_is_not_shaped(patch):
    def change(original):
        def shape(*args, greedy_rewards, **kwargs):
            found = original(*args, greedy_rewards=greedy_rewards, **kwargs)
            return replace(found, greedy_rewards=greedy_rewards)

        return shape

    wrap(patch, maker, "shape_rewards", change)


def rows(function):
    return advantage_estimator(needs_groups=True)(function)


@bug("returns")
def group_std_divides_by_n(patch):
    def estimate(inputs):
        groups = row_level.build_groups(inputs)
        variance = groups.sum_per_row(groups.centred.square()) / groups.count_per_row
        return groups.where_informative(groups.centred / (variance.sqrt() + 1e-6))

    patch.setattr(row_level, "group_norm_advantages", rows(estimate))


@bug("returns", advantage_estimator="rloo")
def leave_one_out_keeps_the_row(patch):
    patch.setattr(row_level, "rloo_advantages", rows(row_level.group_centred_advantages))


@bug("returns", advantage_estimator="opo")
def the_baseline_is_not_weighted_by_lengths(patch):
    patch.setattr(row_level, "opo_advantages", rows(row_level.group_centred_advantages))


@bug("returns", advantage_estimator="dr_grpo")
def the_failed_row_enters_the_group_mean(patch):
    patch.setattr(
        Groups, "count_per_row", property(lambda self: torch.full_like(self.rewards, 4.0))
    )


@bug("returns", gamma=0.9, advantage_estimator="reinforce")
def gamma_acts_twice(patch):
    wrap(
        patch,
        token_level,
        "discounted_returns",
        lambda original: lambda r, m, gamma=1.0: original(r, m, gamma=gamma**2),
    )


@bug("returns", advantage_estimator="gae", lambd=0.8)
def lambda_is_left_out(patch):
    wrap(
        patch,
        token_level,
        "generalized_advantages",
        lambda original: lambda *a, gamma, lambd: original(*a, gamma=gamma, lambd=1.0),
    )


@bug("returns", advantage_estimator="gae")
def returns_are_of_rewards_alone(patch):
    def change(original):
        def estimate(rewards, values, mask, **kwargs):
            found = original(rewards, values, mask, **kwargs)
            return TokenAdvantages(found.advantages, found.advantages)

        return estimate

    wrap(patch, token_level, "generalized_advantages", change)


@bug("returns", init_kl_coef=0.3, steps=2)
def the_kl_reward_has_the_wrong_sign(patch):
    wrap(patch, maker, "estimate_kl", lambda original: lambda *a, **k: -original(*a, **k))


@bug("advantages", teacher="", teacher_coef=0.7)
def the_teacher_has_the_wrong_sign(patch):
    wrap(patch, maker, "teacher_advantages", lambda original: lambda *args: -original(*args))


@bug("advantages", teacher="", teacher_coef=0.7, advantage_estimator="zero")
def the_teacher_has_another_weight(patch):
    def change(original):
        return lambda outputs, mask, config: original(
            outputs, mask, replace(config, teacher_coef=1.0)
        )

    wrap(patch, maker, "teacher_advantages", change)


@bug("teacher logprobs", teacher="")
def the_teacher_scores_the_token_before(patch):
    def change(original):
        def compute(*args, **kwargs):
            outputs = original(*args, **kwargs)
            return replace(outputs, teacher_logprobs=outputs.teacher_logprobs.roll(1, dims=1))

        return compute

    wrap(patch, maker, "compute_outputs", change)


@bug("has a teacher", teacher="")
def the_teacher_is_forgotten(patch):
    def change(original):
        def compute(*args, **kwargs):
            return replace(original(*args, **kwargs), teacher_logprobs=None)

        return compute

    wrap(patch, maker, "compute_outputs", change)


@bug("advantages", advantage_estimator="reinforce++")
def whitening_divides_by_n_less_one(patch):
    wrap(patch, maker, "whiten", lambda original: lambda *args: original(*args, ddof=1))


@bug("advantages", advantage_estimator="reinforce++")
def whitening_is_forgotten(patch):
    wrap(patch, maker, "whiten", lambda _: lambda advantages, *__: advantages)


# --- weights of tokens


@bug("token weights", off_policy_correction="tis:high=1.1")
def the_correction_is_capped_elsewhere(patch):
    def change(original):
        def weights(*args, terms, **kwargs):
            return original(*args, terms=[replace(t, high=2.0) for t in terms], **kwargs)

        return weights

    wrap(patch, corrections, "correction_weights", change)


@bug("token weights", off_policy_correction="reject:k3:token:high=0.001:new/old", max_epochs=2)
def the_trust_region_stays_where_the_policy_was(patch):
    def change(original):
        def weights(old, *args, new_logprobs, **kwargs):
            return original(old, *args, new_logprobs=old, **kwargs)

        return weights

    wrap(patch, corrections, "correction_weights", change)


@bug("token weights", off_policy_correction="tis")
def the_correction_is_upside_down(patch):
    wrap(patch, corrections, "masked_difference", lambda original: lambda *a: -original(*a))


@bug("token weights", high_entropy_token_ratio=0.3, high_entropy_scope="sequence")
def the_most_certain_tokens_are_kept(patch):
    wrap(
        patch,
        updates,
        "high_entropy_mask_per_sequence",
        lambda original: lambda values, mask, ratio: original(-values, mask, ratio=ratio),
    )


# --- the loss


@bug("denominator", policy_loss="dapo")
def padding_is_counted(patch):
    wrap(
        patch,
        updates,
        "local_normalizer",
        lambda original: lambda mask, *a, **k: original(torch.ones_like(mask), *a, **k),
    )


@bug("denominator")
def empty_rows_are_counted(patch):
    wrap(
        patch,
        updates,
        "local_normalizer",
        lambda _: lambda mask, *a, **k: torch.tensor(float(len(mask))).double(),
    )


@bug("denominator", policy_loss="dr_grpo")
def the_budget_is_the_width_of_the_batch(patch):
    wrap(
        patch,
        updates,
        "local_normalizer",
        lambda original: (
            lambda mask, mode, max_response_tokens, **k: original(
                mask, mode, max_response_tokens=mask.shape[1], **k
            )
        ),
    )


@bug("denominator", policy_loss="reinforce")
def a_loss_has_the_aggregation_of_another_paper(patch):
    wrap(
        patch,
        algorithm,
        "policy_loss_traits",
        lambda original: lambda loss: replace(original(loss), aggregation="seq-mean-token-mean"),
    )


@bug("policy loss")
def rows_are_not_divided_by_their_length(patch):
    wrap(patch, objective, "loss_weights", lambda _: lambda mask, mode, dtype, **k: mask.to(dtype))


@bug("policy loss", eps_clip_low=0.05, eps_clip_high=0.3)
def the_clip_bounds_are_exchanged(patch):
    wrap(
        patch,
        clipped,
        "clipped_surrogate",
        lambda original: (
            lambda *a, clip_low, clip_high, **k: original(
                *a, clip_low=clip_high, clip_high=clip_low, **k
            )
        ),
    )


@bug("policy loss")
def the_better_branch_is_taken(patch):
    patch.setattr(clipped.torch, "minimum", torch.maximum)


@bug("gradient norm", policy_loss="gspo")
def the_row_ratio_is_a_sum(patch):
    from lightrft.algorithms import masking

    wrap(
        patch,
        masking,
        "masked_row_mean",
        lambda _: lambda values, mask: torch.where(mask, values, 0.0).sum(-1),
    )


@bug("kl loss", init_kl_coef=0.3, use_kl_loss=True, kl_estimator="k1", steps=2)
def the_kl_loss_has_the_wrong_sign(patch):
    wrap(patch, objective, "estimate_kl", lambda original: lambda *a, **k: -original(*a, **k))


@bug("gradient norm", init_kl_coef=0.3, use_kl_loss=True, kl_estimator="k2", steps=2)
def the_kl_weight_counts_twice(patch):
    def change(original):
        def make(*args, kl_coef, **kwargs):
            return original(*args, kl_coef=2 * kl_coef, **kwargs)

        return make

    wrap(patch, policy_stage, "PolicyUpdate", change)


@bug("value loss", advantage_estimator="gae", value_clip=0.01)
def values_are_not_clipped(patch):
    wrap(
        patch,
        updates,
        "clipped_value_loss",
        lambda original: lambda *a, clip: original(*a, clip=None),
    )


# --- the update


@bug("gradient norm")
def a_micro_batch_counts_half(patch):
    wrap(
        patch,
        AccumulationState,
        "loss_scale",
        lambda original: (
            lambda self, ranks: original(self, ranks) * (0.5 if self.is_last() else 1.0)
        ),
    )


@bug("actor exp_avg after", max_norm=0.01, train_batch_size=16)
def gradients_are_not_clipped(patch):
    patch.setattr(backend, "clip_gradients", lambda *_: None)


@bug("learning rate", lr_warmup_ratio=0.5)
def the_schedule_is_a_step_ahead(patch):
    wrap(
        patch,
        optimizers.LearningRatePlan,
        "__call__",
        lambda original: lambda self, step: original(self, step + 1),
    )


@bug("learning rate")
def the_peak_is_another(patch):
    wrap(
        patch,
        model_training.AdamSettings,
        "read",
        lambda original: (
            lambda kwargs, config: original({**kwargs, "lr": 2 * kwargs["lr"]}, config)
        ),
    )


@bug("actor weights after", train_batch_size=16)
def moments_are_not_corrected(patch):
    def step(self, closure=None):
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

    patch.setattr(torch.optim.AdamW, "step", step)


@bug("betas of the actor", adam_betas=(0.8, 0.95), train_batch_size=16)
def the_betas_are_others(patch):
    def change(original):
        def init(self, params, **kwargs):
            original(self, params, **{**kwargs, "betas": (0.9, 0.95)})

        return init

    wrap(patch, torch.optim.AdamW, "__init__", change)


@bug("actor weight decay of vectors", l2=0.01, train_batch_size=16)
def gains_are_decayed(patch):
    wrap(
        patch,
        backend,
        "parameter_groups",
        lambda _: lambda named, decay: [{"params": [p for _, p in named], "weight_decay": decay}],
    )


@bug("actor weight decay of matrices", l2=0.01, train_batch_size=16)
def decay_counts_twice(patch):
    wrap(
        patch,
        backend,
        "parameter_groups",
        lambda original: lambda named, decay: original(named, 2 * decay),
    )


@bug("actor frozen weights", lora_rank=2, train_batch_size=16)
def frozen_weights_move(patch):
    def change(original):
        def step(self, optimizer, model):
            norm = original(self, optimizer, model)
            with torch.no_grad():
                next(p for p in model.parameters() if not p.requires_grad).mul_(1.001)
            return norm

        return step

    wrap(patch, backend.Backend, "step", change)


@bug("actor weights after", train_batch_size=16)
def an_update_is_lost(patch):
    calls = []

    def change(original):
        def step(self, *args, **kwargs):
            calls.append(1)
            return None if len(calls) == 1 else original(self, *args, **kwargs)

        return step

    wrap(patch, torch.optim.AdamW, "step", change)


# --- decisions: every formula is right, what it is given is not

NUM_FORMULAS = len(BUGS)
KL_LOSS = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"}
# Adam's step does not see by how much all rewards are divided, but their mean.
COUNTED = {**RUNNING, "advantage_estimator": "reinforce"}


@bug("updates of the critic", advantage_estimator="gae")
def the_critic_is_never_trained(patch):
    patch.setattr(updates.PolicyUpdate, "value_step", lambda *_, **__: None)


@bug("updates of the actor", advantage_estimator="gae", freezing_actor_steps=1, steps=2)
def the_actor_stays_frozen_a_step_longer(patch):
    def change(original):
        return lambda self, *a, step_number, **k: original(
            self, *a, step_number=step_number - 1, **k
        )

    wrap(patch, updates.PolicyUpdate, "train", change)


def with_batches_of(size):
    def change(original):
        def plan(lengths, *, train_batch_size, **kwargs):
            return original(lengths, train_batch_size=size, **kwargs)

        return plan

    return change


@bug("updates of the actor")
def all_rows_are_one_optimizer_batch(patch):
    wrap(patch, maker, "plan_minibatches", with_batches_of(16))


@bug("updates of the actor")
def optimizer_batches_are_half_as_large(patch):
    wrap(patch, maker, "plan_minibatches", with_batches_of(4))


@bug("rows that train the actor", max_epochs=2)
def an_epoch_trains_one_batch_twice_and_the_next_the_other(patch):
    wrap(patch, updates, "epoch_order", lambda _: lambda count, *, epoch, **__: (epoch,) * count)


@bug("KL weight", **KL_LOSS, steps=2)
def the_kl_weight_begins_at_twice_the_option(patch):
    wrap(
        patch,
        PolicyMemory,
        "initial",
        lambda original: (
            lambda config, *a, **k: original(
                replace(config, init_kl_coef=2 * config.init_kl_coef), *a, **k
            )
        ),
    )


@bug("KL weight", **KL_LOSS, steps=2)
def the_kl_weight_grows_without_a_target(patch):
    patch.setattr(
        KlController, "update", lambda self, *_, **__: replace(self, coef=1.5 * self.coef)
    )


@bug("KL weight", **KL_LOSS, kl_target=0.01, kl_horizon=50, steps=3)
def the_kl_controller_has_the_wrong_sign(patch):
    def change(original):
        def update(self, *args, **kwargs):
            return replace(self, coef=2 * self.coef - original(self, *args, **kwargs).coef)

        return update

    wrap(patch, KlController, "update", change)


def with_moments(change):
    """Another memory of rewards after each step."""

    def wrapped(original):
        def after(self, step, **kwargs):
            found = original(self, step, **kwargs)
            return replace(found, moments=change(found.moments, self.moments))

        return after

    return wrapped


@bug("rewards counted before", **COUNTED, steps=3)
def reward_moments_are_forgotten(patch):
    wrap(patch, PolicyMemory, "after_step", with_moments(lambda *_: Moments()))


@bug("rewards counted before", **COUNTED, steps=3)
def reward_moments_count_twice(patch):
    wrap(patch, PolicyMemory, "after_step", with_moments(lambda new, old: new.merge(new)))


@bug("Adam's steps, actor", steps=2)
def adam_forgets_its_state(patch):
    def change(original):
        def observer(self, *args):
            self.models.main.optimizer.state.clear()
            return original(self, *args)

        return observer

    wrap(patch, policy_stage.PolicyStage, "observe_step", change)


@bug("schedule position, actor", steps=2)
def the_schedule_advances_twice(patch):
    def change(original):
        def step(self, *args):
            original(self, *args)
            if args == () and self.last_epoch > 0:
                original(self)

        return step

    wrap(patch, optimizers.PlannedLR, "step", change)


@bug("schedule length, actor", max_epochs=2, lr_scheduler="linear", steps=2)
def the_schedule_forgets_the_epochs(patch):
    patch.setattr(TrainConfig, "steps_per_rollout", property(lambda self: self.num_minibatches))


@bug("optimizer of the actor", l2=0.01, train_batch_size=16)
def decay_is_coupled(patch):
    def create(self, module, settings):
        groups = backend.parameter_groups(module.named_parameters(), settings.weight_decay)
        return torch.optim.Adam(groups, lr=settings.lr, betas=settings.betas)

    patch.setattr(backend.Backend, "create_optimizer", create)


@bug("actor weights", learning_rate_factors={"mlp": 0.5}, train_batch_size=16)
def all_parts_have_one_rate(patch):
    patch.setattr(backend, "with_rate_factors", lambda groups, *_: groups)


def without(part):
    def change(original):
        return lambda named, decay: original([(n, p) for n, p in named if part not in n], decay)

    return change


@bug("trained weights of the actor", train_batch_size=16)
def attention_is_not_trained(patch):
    wrap(patch, backend, "parameter_groups", without("self_attn"))


@bug("trained weights of the actor", train_batch_size=16)
def the_final_norm_is_not_trained(patch):
    wrap(patch, backend, "parameter_groups", without("model.norm"))


@bug("scale of adapters", lora_rank=2, lora_alpha=3.0, steps=2)
def adapters_count_twice(patch, world):
    def change(original):
        def init(self, model, config):
            original(self, model, replace(config, lora_alpha=2 * config.lora_alpha))

        return init

    wrap(patch, world.LoraActor, "__init__", change)


@bug("prompts of groups", advantage_estimator="group_norm")
def rows_of_a_group_have_different_prompts(patch, world):
    def change(original):
        def samples(*args, **kwargs):
            found = original(*args, **kwargs)
            scored = [
                replace(item, rollout=replace(item.rollout, group_id=number % world.GROUPS))
                for number, item in enumerate(found.scored)
            ]
            return replace(found, scored=scored, table=row_table(scored))

        return samples

    wrap(patch, world, "shaped", change)


# --- in bfloat16, where the largest distance of a token says little


@bug("gradient norm, actor update 1", bf16=True, entropy_coef=0.3)
def the_entropy_has_no_gradient(patch):
    def change(original):
        def terms(self, tokens, logprobs, entropy):
            return original(self, tokens, logprobs, entropy.detach())

        return terms

    # The first gradient is further off than bfloat16 makes it.
    wrap(patch, objective.PolicyObjective, "terms", change)


@bug("first weights of the actor", bf16=True, also="old logprobs (mean distance)")
def weights_change_between_sampling_and_update(patch):
    def change(original):
        def observer(self, *args):
            with torch.no_grad():
                for parameter in self.models.main.model.parameters():
                    parameter.mul_(1.02)
            return original(self, *args)

        return observer

    # Also by the mean distance of a token: in later steps the first weights are not at hand.
    wrap(patch, policy_stage.PolicyStage, "observe_step", change)


def with_eps(patch, eps):
    wrap(
        patch,
        model_training.AdamSettings,
        "read",
        lambda original: lambda kwargs, config: replace(original(kwargs, config), eps=eps),
    )


@bug("eps of the actor", bf16=True)
def the_eps_of_adam_is_a_hundred_thousandth(patch):
    with_eps(patch, 1e-5)


@bug("eps of the actor", bf16=True)
def the_eps_of_adam_is_a_millionth(patch):
    with_eps(patch, 1e-6)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found_and_named(name, audited, monkeypatch, world):
    first, how, plant = BUGS[name]
    how = dict(how)
    steps, also = how.pop("steps", 1), how.pop("also", first)
    takes_world = plant.__code__.co_argcount == 2
    plant(monkeypatch, world) if takes_world else plant(monkeypatch)
    report = audited({"max_epochs": 1, **how}, steps=steps)
    assert report.first_difference is not None, "nothing was found"
    assert report.first_difference.quantity.startswith(first)
    assert any(row.quantity.startswith(also) for row in report.rows if row.verdict == DIFFERS)


@pytest.mark.slow
@pytest.mark.shard("audit_decisions")
@pytest.mark.parametrize("name", list(BUGS)[NUM_FORMULAS:])
def test_a_wrong_decision_changes_the_weights(
    name, world, micro_model, micro_teacher, tmp_path, monkeypatch
):
    _, how, plant = BUGS[name]
    changes = {"max_epochs": 1, **how}
    steps, _ = changes.pop("steps", 1), changes.pop("also", None)
    if "teacher" in changes:
        changes["teacher"] = micro_teacher
    given = (monkeypatch, world)[: plant.__code__.co_argcount]
    effect = world.effect_of(lambda: plant(*given), micro_model, tmp_path, changes, steps=steps)
    assert effect > 1e-3


def test_an_optimizer_s_fault_shows_at_the_next_update(audited, monkeypatch):
    monkeypatch.setattr(backend, "clip_gradients", lambda *_: None)
    first = audited({"max_norm": 0.01, "max_epochs": 1}).first_difference
    assert first.quantity == "logprobs, actor update 2"
    assert "update 1" in first.note


def test_there_are_enough_bugs():
    assert len(BUGS) >= 30
