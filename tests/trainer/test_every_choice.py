"""Every choice that the command line offers is accepted and changes the numbers."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from tests.update_inputs import TablePolicy, one_update, sample_table

from lightrft.algorithms.advantages.row_level import CPGD_WEIGHTINGS
from lightrft.algorithms.correction_terms import CORRECTION_PRESETS
from lightrft.config import TrainConfig
from lightrft.config.options import options_of
from lightrft.experience.maker import AdvantageSettings, assemble, shape_rewards
from lightrft.records.batch import PolicyOutputs, collate
from lightrft.stages.policy.algorithm import check_algorithm, decide
from lightrft.strategy import get_fake_strategy

VOCAB = 31
BASE = {
    "train_batch_size": 12,
    "n_samples_per_prompt": 4,
    "rollout_batch_size": 3,
    "micro_train_batch_size": 4,
    "init_kl_coef": 0.3,
    "use_kl_loss": True,
    "bf16": False,
    "generate_max_len": 40,
    "gamma": 0.95,
    "max_norm": 0.0,
    "loss_agg_mode": "token-mean",
}
# Choices that are two names for one thing.
SAME = {
    "policy_loss": ({"ppo", "clipped", "dr_grpo"},),
    # CPGD weighs by the standard deviation, as GRPO does, unless advantage_args say otherwise.
    "advantage_estimator": ({"group_norm", "grpo", "cpgd"},),
    # No token of this batch reaches the bound of k3.
    "kl_estimator": ({"k3", "k3_unclamped"}, {"k2", "k1+", "k3+"}, {"k2_is", "k3_is"}),
}
# The choices of these act elsewhere: on the model, the engine, the schedule, the processes.
ELSEWHERE = {
    # tests/stages
    "preference_loss",
    "reward_head_losses",
    "reward_loss",
    "reward_pooling",
    "sft_loss",
    "train_on",
    "compile_backend",
    "engine_type",
    "grad_accum_dtype",
    "judge_compare",
    "loggers",
    # It is the options that it sets.
    "overlap",
    "lora_sync",
    "lr_scheduler",
    "prompt_sampler",
    "quantize",
    "routing_replay",
    "shared_prefix",
    "truncated_logprobs",
    "agent_denominator",
    "reward_failure",
    "sandbox",
    "tool_parser",
    "turn_credit",
    "zero_stage",
}


def samples():
    generator = np.random.default_rng(3)
    lengths = generator.integers(20, 41, 12)
    num_tokens = int(lengths.sum())
    rewards = abs(generator.normal(size=12)).round(2)
    # A prompt that teaches nothing.
    rewards[8:] = 0.5
    return sample_table(
        lengths,
        rewards=rewards,
        token_ids=generator.integers(0, VOCAB, num_tokens + 24),
        rollout_logprobs=generator.normal(-3.9, 0.5, num_tokens).astype(np.float32),
    )


def step(changes):
    """The change of the policy in one update with these options."""
    config = TrainConfig(**{**BASE, **changes})
    strategy = get_fake_strategy(config)
    options, algorithm = decide(config)
    has_teacher = options.teacher is not None
    check_algorithm(
        options,
        algorithm,
        has_critic=True,
        has_reference=True,
        engine_type="hf",
        has_teacher=has_teacher,
    )
    table, policy = samples(), TablePolicy(VOCAB, torch.float32)
    rollouts = collate(table, temperature=1.0, device=torch.device("cpu"))
    mask = rollouts.response_mask
    generator = torch.Generator().manual_seed(5)

    def noise(scale):
        return torch.randn(mask.shape, generator=generator) * scale * mask

    with torch.no_grad():
        now = policy(rollouts.token_ids, None, entropy="grad")
    # Ratios on both sides of every clip range, and values.
    old = (now.logprobs.float() + noise(0.25)) * mask
    outputs = PolicyOutputs(old, old + noise(0.7), noise(0.6), now.entropy.float() * mask)
    if has_teacher:
        outputs = replace(outputs, teacher_logprobs=old + noise(0.5))
    greedy = torch.linspace(-1, 1, 12).double()
    batch = assemble(
        table,
        torch.arange(12),
        rollouts,
        outputs,
        shape_rewards(table, None, TrainConfig(), greedy_rewards=greedy),
        settings=AdvantageSettings(
            options, algorithm.estimator, kl_coef=0.0 if options.use_kl_loss else 0.3
        ),
        context=strategy.context,
    )
    before = policy.table.detach().clone()
    one_update(
        policy,
        batch,
        options,
        training=strategy.training,
        loss=algorithm.policy_loss,
        rate=1.0,
        corrections=algorithm.corrections,
        kl_coef=0.3 if options.use_kl_loss else 0.0,
    )
    return policy.table.detach() - before


def choices(name):
    return {choice: {name: choice} for choice in options_of(TrainConfig)[name][1].choices}


def with_near_bounds(correction):
    """The correction with bounds that some of the rows keep and others do not."""
    for far, near in (
        ("low=0.999:high=1.002", "low=0.9:high=1.1"),
        ("low=0.0001", "low=0.05"),
        ("k1:geometric:high=0.5", "k1:geometric:high=0.05"),
    ):
        correction = correction.replace(far, near)
    return correction


UPDATES = {
    "policy_loss": choices("policy_loss"),
    "advantage_estimator": choices("advantage_estimator")
    | {"zero": {"advantage_estimator": "zero", "teacher": "folder"}},
    "loss_agg_mode": choices("loss_agg_mode"),
    "kl_estimator": choices("kl_estimator"),
    "off_policy_correction": {
        name: {"off_policy_correction": with_near_bounds(text)}
        for name, text in CORRECTION_PRESETS.items()
    },
    "high_entropy_scope": {
        scope: {**change, "high_entropy_token_ratio": 0.3}
        for scope, change in choices("high_entropy_scope").items()
    },
    "advantage_args": {
        name: {"advantage_estimator": "cpgd", "advantage_args": {"weighting": name}}
        for name in CPGD_WEIGHTINGS
    },
}


@pytest.mark.parametrize("name", UPDATES)
def test_every_choice_is_accepted_and_gives_another_update(name):
    found = {choice: step(changes) for choice, changes in UPDATES[name].items()}
    assert all(torch.isfinite(change).all() and change.norm() > 0 for change in found.values())
    for first, second in combinations(sorted(found), 2):
        is_same = any({first, second} <= names for names in SAME.get(name, ()))
        difference = float((found[first] - found[second]).norm() / found[first].norm())
        assert (difference < 1e-12) if is_same else (difference > 1e-4), (first, second)


@pytest.mark.parametrize(
    "changes",
    [
        {"init_kl_coef": 0.3, "use_kl_loss": False},
        {"advantages_norm": True},
        {"advantage_clip": 0.2},
        {"teacher": "folder"},
        {"teacher": "folder", "teacher_coef": 0.5},
        {"advantage_estimator": "gae", "lambd": 0.5},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_an_option_of_the_advantages_changes_the_update(changes):
    # What it takes for an option to act stays as it is.
    needed = {"lambd": "advantage_estimator", "teacher_coef": "teacher"}
    kept = {needed[name]: changes[needed[name]] for name in changes if name in needed}
    reference = step(kept)
    assert float((step(changes) - reference).norm() / reference.norm()) > 1e-4


def test_no_choice_is_left_out():
    offered = {
        name for name, (_, info) in options_of(TrainConfig).items() if info.choices is not None
    }
    assert offered - set(UPDATES) == ELSEWHERE
