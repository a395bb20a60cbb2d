"""Decisions that no formula holds: each changes the weights, and the audit of the step finds it.

Most are options that one part of a run reads otherwise. All but the links of two steps are found
in the record of a single step.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tools.audit import world
from tests.tools.audit.faults import (
    before_each_step,
    calls,
    keywords,
    results,
    scaled,
    trained_without,
)

from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import moments_of
from lightrft.experience import delivery, maker
from lightrft.models import lora
from lightrft.records.batch import select_experience
from lightrft.stages.policy import maker as policy_maker, policy_stage, updates
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.strategy import backend
from lightrft.tools.audit.record import recorded_steps, step_folder
from lightrft.tools.audit.report import audit_step

pytestmark = pytest.mark.shard("audit_decisions")


def changed(config, options):
    found = config.__class__.__new__(config.__class__)
    found.__dict__.update({**config.__dict__, **options})
    return found


def update_reads(**options):
    """The update reads other options."""
    return calls(
        policy_stage,
        "PolicyUpdate",
        lambda o, config, *a, **k: o(changed(config, options), *a, **k),
    )


def experience_reads(**options):
    """Rewards, advantages and optimizer batches follow other options."""
    return calls(
        policy_maker,
        "make_experience",
        lambda o, *a, settings, **k: o(
            *a, settings=replace(settings, config=changed(settings.config, options)), **k
        ),
    )


def strategy_reads(**options):
    """Optimizers, schedules and clipping follow other options."""

    def change(original, config):
        found = original(config)
        found.config.__dict__.update(options)
        return found

    return calls(world, "get_fake_strategy", change)


def memory_reads(**options):
    """The KL controller follows other options."""
    return calls(
        PolicyMemory, "initial", lambda o, config, *a, **k: o(changed(config, options), *a, **k)
    )


def optimizer_is(change):
    """The optimizer of every model, changed when it is made."""

    def create(original, self, module, settings):
        return change(original(self, module, settings), module)

    return calls(backend.Backend, "create_optimizer", create)


CRITIC = {"advantage_estimator": "gae"}
KL_LOSS = {"init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "k2"}
KL_REWARD = {"init_kl_coef": 0.2, "kl_estimator": "k1", "advantage_estimator": "reinforce++"}
RUNNING = {"reward_running_norm": True, "reward_running_norm_minus_mean": True}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 3.0}

# What acts, and options of the run: parts that read other options than were given.
OPTIONS = {
    "one epoch of two": (update_reads(max_epochs=1), {"max_epochs": 2}),
    "one epoch more": (update_reads(max_epochs=2), {}),
    "a bonus for entropy": (update_reads(entropy_coef=0.1), {}),
    "no bonus for entropy": (update_reads(entropy_coef=0.0), {"entropy_coef": 0.1}),
    "values are clipped": (update_reads(value_clip=0.01), {**CRITIC, "value_clip": 0.0}),
    "the actor is not frozen": (
        update_reads(freezing_actor_steps=-1),
        {**CRITIC, "freezing_actor_steps": 1},
    ),
    "the actor is frozen": (update_reads(freezing_actor_steps=1), {}),
    "tokens of the batch, not of each row": (
        update_reads(high_entropy_scope="batch"),
        {"high_entropy_token_ratio": 0.3, "high_entropy_scope": "sequence"},
    ),
    "the other tokens": (
        update_reads(high_entropy_token_ratio=0.7),
        {"high_entropy_token_ratio": 0.3},
    ),
    "a mean over tokens": (update_reads(loss_agg_mode="token-mean"), {}),
    "a KL term of another estimator": (update_reads(kl_estimator="abs"), {**KL_LOSS, "steps": 2}),
    "no KL term in the loss": (
        keywords(policy_stage, "PolicyUpdate", kl_coef=0.0),
        {**KL_LOSS, "steps": 2},
    ),
    "returns without discount": (
        experience_reads(gamma=1.0),
        {"gamma": 0.8, "advantage_estimator": "reinforce"},
    ),
    "another lambda": (experience_reads(lambd=1.0), {**CRITIC, "lambd": 0.5}),
    "advantages are not clipped": (experience_reads(advantage_clip=0.0), {"advantage_clip": 0.5}),
    "advantages are whitened": (
        experience_reads(advantages_norm=True),
        {"advantage_estimator": "dr_grpo"},
    ),
    "rewards are not clipped": (experience_reads(reward_clip=0.0), {"reward_clip": 0.3}),
    "the running mean stays in": (
        experience_reads(reward_running_norm_minus_mean=False),
        {**RUNNING, "advantage_estimator": "reinforce"},
    ),
    "old logprobs of the actor": (
        experience_reads(use_rollout_logprobs=False),
        {"use_rollout_logprobs": True},
    ),
    "old logprobs of the engine": (experience_reads(use_rollout_logprobs=True), {}),
    "another seed of the batches": (experience_reads(seed=4), {}),
    "turns discounted by token": (
        experience_reads(turn_credit="last"),
        {"gamma": 0.5, "turn_credit": "discounted", "advantage_estimator": "reinforce++"},
    ),
    "gradients are not clipped": (strategy_reads(max_norm=0.0), {"max_norm": 0.05}),
    "other betas": (strategy_reads(adam_betas=(0.9, 0.999)), {}),
    "no weight decay": (strategy_reads(l2=0.0), {"l2": 0.1}),
    "another rate of the critic": (strategy_reads(critic_learning_rate=2e-3), CRITIC),
    "no warm-up": (strategy_reads(lr_warmup_ratio=0.0), {"lr_warmup_ratio": 0.5}),
    "a constant rate": (strategy_reads(lr_scheduler="constant"), {"lr_scheduler": "linear"}),
    "another end of the rate": (strategy_reads(min_lr_ratio=0.9), {}),
    "a KL weight that follows a target": (
        memory_reads(kl_target=1e-4, kl_horizon=20),
        {**KL_REWARD, "steps": 3},
    ),
    "a KL weight that follows no target": (
        memory_reads(kl_target=None),
        {**KL_REWARD, "kl_target": 1e-4, "kl_horizon": 20, "steps": 3, "linked": True},
    ),
    "a KL weight that follows another target": (
        memory_reads(kl_target=1e-4),
        {**KL_LOSS, "kl_target": 1e4, "kl_horizon": 20, "steps": 3, "linked": True},
    ),
    "a KL weight of another horizon": (
        memory_reads(kl_horizon=80),
        {**KL_REWARD, "kl_target": 1e-4, "kl_horizon": 20, "steps": 3, "linked": True},
    ),
    "a KL controller of half the rows": (
        keywords(KlController, "update", num_samples=lambda count: count / 2),
        {**KL_REWARD, "kl_target": 1e-4, "kl_horizon": 20, "steps": 3, "linked": True},
    ),
}


def learns_once(original, self, batch, trained, **kwargs):
    if all(update.facts.model != trained.name for update in self.observer.updates):
        original(self, batch, trained, **kwargs)


def in_given_order(original, lengths, *, train_batch_size, **kwargs):
    batches = np.arange(len(lengths)).reshape(-1, train_batch_size)
    return maker.MinibatchPlan(tuple((tuple(map(int, batch)),) for batch in batches))


def of_first_step(original, *args, step, **kwargs):
    return original(*args, step=0, **kwargs)


def with_own_rows(original, self, batch, *args, **kwargs):
    """Each update trains half of the rows, and Z is theirs."""
    half = select_experience(batch, slice(0, len(batch.advantages) // 2))
    original(self, half, *args, **{**kwargs, "slices": ()})


SIZES = {
    "the last batch is left out": (results(updates, "epoch_order", lambda order: order[:-1]), {}),
    "a later epoch lacks a batch": (
        calls(updates, "epoch_order", lambda o, n, *, epoch, **k: o(n, epoch=epoch, **k)[epoch:]),
        {"max_epochs": 2},
    ),
    "the critic learns once": (calls(updates.PolicyUpdate, "value_step", learns_once), CRITIC),
    "batches of whole groups": (calls(delivery, "plan_minibatches", in_given_order), {}),
    "every step has the batches of the first": (
        calls(delivery, "plan_minibatches", of_first_step),
        {"steps": 2},
    ),
    "half of each batch": (calls(updates.PolicyUpdate, "policy_step", with_own_rows), {}),
    "half of the critic's batch": (
        calls(updates.PolicyUpdate, "value_step", with_own_rows),
        CRITIC,
    ),
    "a micro batch of all rows": (
        calls(
            updates.PolicyUpdate,
            "policy_step",
            lambda o, self, b, *a, slices, **k: o(
                self, b, *a, slices=[slice(0, len(b.advantages))], **k
            ),
        ),
        {"policy_loss": "kl_cov", "policy_loss_args": {"cov_ratio": 0.3}},
    ),
}


def unscaled_groups(optimizer, module):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if group["weight_decay"] else 2 * group["lr"]
    return optimizer


def new_each_time(original, self, *args, **kwargs):
    """The moments begin anew in each update."""
    for state in self.state.values():
        state.clear()
    return original(self, *args, **kwargs)


def amsgrad(optimizer, module):
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    return optimizer


OPTIMIZERS = {
    "the embedding is not trained": (trained_without("embed_tokens"), {}),
    "the output layer alone is trained": (trained_without("layers"), {}),
    "norms are not trained": (trained_without("norm"), {}),
    "the critic's trunk is not trained": (trained_without("trunk"), CRITIC),
    "the critic's head is not trained": (trained_without("value_head"), CRITIC),
    "second factors alone are trained": (trained_without("lora_A"), ADAPTERS),
    "adapters of queries alone": (
        calls(lora, "target_layers", lambda o, *a, **k: [n for n in o(*a, **k) if "q_proj" in n]),
        ADAPTERS,
    ),
    "vectors learn twice as fast": (optimizer_is(unscaled_groups), {"l2": 0.01}),
    "plain gradient descent": (
        optimizer_is(lambda o, m: torch.optim.SGD(m.parameters(), lr=o.param_groups[0]["lr"])),
        {},
    ),
    "the largest second moment": (optimizer_is(amsgrad), {"steps": 2}),
    "moments of one update": (calls(torch.optim.AdamW, "step", new_each_time), {}),
    "gradients of the update before": (
        calls(torch.optim.Optimizer, "zero_grad", lambda o, self, *a, **k: None),
        {},
    ),
    "a schedule that begins anew each step": (
        before_each_step(lambda main: main.scheduler.step(0)),
        {"steps": 2},
    ),
}


def rolled(original, *args, **kwargs):
    found = original(*args, **kwargs)
    return replace(found, rewards=found.rewards.roll(1))


def follows_the_policy(original, batch, models, **kwargs):
    return original(batch, replace(models, reference=models.actor), **kwargs)


def renewed(original, self, batch, actor, **kwargs):
    outputs = replace(batch.outputs, old_logprobs=None)
    original(self, replace(batch, outputs=outputs), actor, **kwargs)


def with_moments(change):
    def after(original, self, batch, **kwargs):
        found = original(self, batch, **kwargs)
        return replace(found, moments=change(self.moments, batch.experience))

    return calls(PolicyMemory, "after_step", after)


def rounds(original, self, batch, metrics):
    with torch.no_grad():
        for parameter in self.models.main.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return original(self, batch, metrics)


STATES = {
    "rewards of the row before": (calls(maker, "shape_rewards", rolled), {}),
    "a reference that follows the policy": (
        calls(maker, "compute_outputs", follows_the_policy),
        {**KL_REWARD, "steps": 2},
    ),
    "old logprobs of each update": (
        calls(updates.PolicyUpdate, "policy_step", renewed),
        {"eps_clip": 0.02},
    ),
    "weights that change between two steps": (
        before_each_step(scaled("", 1.01)),
        {"steps": 2},
    ),
    "moments of the last step alone": (
        with_moments(lambda before, step: moments_of(step.rewards.rewards)),
        {**RUNNING, "advantage_estimator": "reinforce", "steps": 3},
    ),
    "moments of shaped rewards": (
        with_moments(lambda before, step: before.merge(moments_of(step.rewards.rewards))),
        {**RUNNING, "advantage_estimator": "reinforce", "steps": 2, "linked": True},
    ),
    "weights that are rounded between two steps": (
        calls(policy_stage.PolicyStage, "finish", rounds),
        {"steps": 2, "linked": True, "actor_learning_rate": 1e-3},
    ),
    "bfloat16": (
        calls(world, "get_fake_strategy", lambda o, config: o(config.replaced({"bf16": True}))),
        {},
    ),
}
FAULTS = OPTIONS | SIZES | OPTIMIZERS | STATES


# One of each way to plant a fault: a way that the program has left behind shows at once.
SAMPLED = (
    "one epoch of two",
    "returns without discount",
    "another end of the rate",
    "a KL weight that follows a target",
    "batches of whole groups",
    "adapters of queries alone",
    "the largest second moment",
    "weights that change between two steps",
    "moments of the last step alone",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.slow) for name in FAULTS],
)
def test_a_wrong_decision_is_found(name, micro_model, tmp_path, monkeypatch):
    plant, options = FAULTS[name]
    options = {"max_epochs": 1, **options}
    is_linked, steps = options.pop("linked", False), options.pop("steps", 1)
    shape = world.with_observations if "turn_credit" in options else None
    plant(monkeypatch)
    world.record_step(micro_model, tmp_path, options, steps=steps, shape=shape)
    if not is_linked:
        for step in recorded_steps(tmp_path)[:-1]:
            shutil.rmtree(step_folder(tmp_path, step))
    assert audit_step(tmp_path).first_difference is not None
