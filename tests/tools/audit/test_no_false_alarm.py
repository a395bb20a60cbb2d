"""A correct run never differs, whatever its algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models import planted_prefixes
from tests.tools.audit import world as step_world

from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES as LOSS_NAMES,
)
from lightrft.experience import delivery
from lightrft.models import proof
from lightrft.records.rollout import ScoredRollout
from lightrft.tools.audit import batches
from lightrft.tools.audit.advantages import ESTIMATORS
from lightrft.tools.audit.corrections import PRESETS
from lightrft.tools.audit.findings import DIFFERS, NOT_AUDITED
from lightrft.tools.audit.losses import POLICY_LOSSES

pytestmark = pytest.mark.shard("audit")

ALIASES = {"clipped", "grpo"}
LOSSES = [name for name in POLICY_LOSSES if name not in ALIASES]
NAMES = [name for name in ESTIMATORS if name not in ALIASES]
# Every loss, estimator and aggregation at least once.
COVER = [
    (NAMES[i % len(NAMES)], LOSSES[i % len(LOSSES)], AGGREGATIONS[i % len(AGGREGATIONS)])
    for i in range(max(map(len, (NAMES, LOSSES, AGGREGATIONS))))
]
# The engine's logprobs as old ones: the ratios of the first update leave every clip range.
ONE_UPDATE = {
    "max_epochs": 1,
    "train_batch_size": 16,
    "micro_train_batch_size": 8,
    "use_rollout_logprobs": True,
}


def test_every_name_of_the_registries_is_audited():
    assert set(LOSS_NAMES) == set(POLICY_LOSSES)
    assert set(ADVANTAGE_ESTIMATORS) == set(ESTIMATORS)


def assert_equal(report):
    different = [row for row in report.rows if row.verdict == DIFFERS]
    assert different == []
    assert sum(row.verdict != NOT_AUDITED for row in report.rows) > 10


def algorithm(name, loss, mode):
    changes = {"advantage_estimator": name, "policy_loss": loss, "loss_agg_mode": mode}
    if name == "zero":
        changes["teacher"] = ""
    # Shares that choose some of the few tokens there are.
    if loss in ("clip_cov", "kl_cov"):
        changes["policy_loss_args"] = {"cov_ratio": 0.2}
    if loss == "clip_cov":
        changes["policy_loss_args"] |= {"cov_low": 0.01}
    return changes


@pytest.mark.parametrize("cell", COVER, ids="-".join)
def test_every_estimator_loss_and_aggregation(cell, audited, world):
    changes = {**algorithm(*cell), **ONE_UPDATE}
    assert_equal(audited(changes, sgd=True, shape=world.shape_of(cell[0])))


# Bounds between what the few tokens of these samples have.
NEAR = {
    "low=0.999:high=1.002": "low=0.9:high=1.1",
    "low=0.0001": "low=0.6",
    "k1:geometric:high=0.5": "k1:geometric:high=-0.1",
    "high=0.2:positive": "high=0.005:positive",
    "low=-0.2:negative": "low=-0.005:negative",
}
FURTHER = [
    "tis:high=3:mean-one",
    "reject:k3:worst:high=0.05",
    "reject:reverse_k3:token:high=0.05",
    "reject:binary_kl:geometric:high=0.0005",
    "reject:distance:geometric:high=0.2:towards",
    "weight:ratio:largest:high=1.3 reject:ratio:largest:low=0.9:high=1.4",
    # The policy that moves, in the last of four updates far from where it began.
    "tis:new/engine reject:k3:token:high=0.001:new/old",
    "weight:ratio:sequence:high=1.5:new/old reject:binary_kl:worst:high=0.01:new/engine",
]


@pytest.mark.parametrize("text", [*PRESETS, *FURTHER])
def test_corrections(text, audited):
    correction = PRESETS.get(text, text)
    for far, near in NEAR.items():
        correction = correction.replace(far, near)
    epochs = 2 if "new/" in correction else 1
    report = audited({"off_policy_correction": correction, "max_epochs": epochs}, sgd=True)
    assert_equal(report)
    weights = [row for row in report.rows if row.quantity.startswith("token weights")]
    assert len(weights) == 2 * epochs
    if "mean-one" not in text:
        assert any(abs(row.own - 1) > 1e-3 for row in weights)


@pytest.mark.parametrize("text", ["tis", "off-policy-mask"])
@pytest.mark.parametrize("batch_size", [8, 16], ids=["forward-first", "forward-of-the-update"])
@pytest.mark.parametrize("law", ["kept", "all"])
def test_corrections_of_truncated_samples(text, batch_size, law, audited, world):
    correction = PRESETS[text].replace("high=0.5", "high=-0.1")
    options = {"off_policy_correction": correction, "top_k": 5, "max_epochs": 1}
    options |= {"train_batch_size": batch_size, "truncated_logprobs": law}
    assert_equal(audited(options, sgd=True, shape=world.with_kept_ids))


def test_a_share_of_decay_that_the_first_step_hides_is_said_to_be_hidden(audited):
    report = audited({"actor_learning_rate": 1e-6, "max_epochs": 1})
    assert_equal(report)
    notes = [row.note for row in report.rows if row.quantity == "actor weight decay of vectors"]
    assert notes == ["its share is below the noise of Adam's first step"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "estimator, place",
    [
        *((name, "loss") for name in (None, *KL_ESTIMATORS)),
        ("k1", "reinforce++"),
        (None, "rloo"),
        slow("k1", "gae"),
    ],
)
def test_kl_terms(estimator, place, audited):
    is_loss = place == "loss"
    changes = {"init_kl_coef": 0.2, "kl_estimator": estimator, "use_kl_loss": is_loss}
    name = "group_norm" if is_loss else place
    # Of two steps the second has a policy that left the reference.
    report = audited({**changes, "advantage_estimator": name, "max_epochs": 1}, steps=2)
    assert report.step == 2
    assert_equal(report)


VARIANTS = {
    "critic": {"advantage_estimator": "gae", "value_clip": 0.05, "l2": 0.1, "entropy_coef": 0.02},
    "critic without clip": {"advantage_estimator": "gae", "value_clip": 0.0, "lambd": 0.5},
    "frozen actor": {"advantage_estimator": "gae", "freezing_actor_steps": 1},
    "rewards": {
        "reward_running_norm": True,
        "reward_running_norm_minus_mean": True,
        "reward_clip": 0.7,
        "overlong_buffer": True,
        "overlong_buffer_len": 5,
        "advantages_norm": True,
        "advantage_clip": 1.0,
    },
    "cut responses": {"mask_truncated": True, "advantage_estimator": "rloo"},
    "entropy of the batch": {"high_entropy_token_ratio": 0.3},
    "entropy of a row": {
        "high_entropy_token_ratio": 0.3,
        "high_entropy_scope": "sequence",
        "off_policy_correction": "tis",
    },
    "bounds": {"eps_clip_low": 0.05, "eps_clip_high": 0.1, "dual_clip": 1.3, "max_norm": 0.05},
    "schedule": {"lr_warmup_ratio": 0.6, "lr_scheduler": "linear"},
    "constant rate": {"lr_warmup_ratio": 0.3, "lr_scheduler": "constant"},
    "rates of parts": {"learning_rate_factors": {"self_attn": 0.5, "mlp": 2.0}, "l2": 0.1},
    "engine's logprobs": {"use_rollout_logprobs": True},
    "temperature": {"temperature": 0.7, "entropy_coef": 0.01},
    "adapters": {"lora_rank": 2, "lora_alpha": 3.0, "init_kl_coef": 0.1, "l2": 0.1},
    "one update": {"train_batch_size": 16, "max_epochs": 1},
    "own arguments": {
        "advantage_estimator": "cpgd",
        "advantage_args": {"weighting": "clip_filter"},
        "policy_loss": "cpgd",
        "policy_loss_args": {"drift_coef": 0.3},
    },
    "packed": {"packing_samples": True, "fused_linear_logprob": True},
    "prompts once": {
        "packing_samples": True,
        "shared_prefix": "auto",
        "micro_batch_tokens": 32,
    },
    "teacher": {
        "teacher": "",
        "teacher_coef": 0.7,
        "advantage_estimator": "reinforce++",
        "temperature": 0.7,
        "advantage_clip": 2.0,
    },
    "distilled": {"teacher": "", "advantage_estimator": "zero", "init_kl_coef": 0.1},
}


BY_DEFAULT = ("critic", "rewards", "adapters", "temperature", "schedule", "teacher", "distilled")
BY_DEFAULT += ("rates of parts",)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_further_options(name, audited):
    assert_equal(audited(VARIANTS[name]))


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "gae", "init_kl_coef": 0.1, "turn_credit": "discounted"},
        {"advantage_estimator": "opo", "loss_agg_mode": "seq-mean-token-mean"},
        {
            "advantage_estimator": "group_norm",
            "turn_credit": "discounted",
            "init_kl_coef": 0.1,
            "use_kl_loss": True,
        },
        {"off_policy_correction": "tis", "advantage_estimator": "reinforce++"},
        {"advantage_estimator": "gae", "lambd": 0.9, "advantage_args": {"length_alpha": 0.4}},
        {"advantage_estimator": "gae", "advantage_args": {"policy_lambd": 0.5}},
    ],
    ids=["gae", "opo", "group_norm", "reinforce++", "length_alpha", "policy_lambd"],
)
def test_steps_on_episodes(changes, audited, world):
    report = audited({"gamma": 0.8, **changes}, shape=world.with_observations)
    assert_equal(report)


def test_prompts_that_are_computed_once(audited, monkeypatch):
    for module in (proof, delivery, batches):
        monkeypatch.setattr(module, "MIN_SHARED_TOKENS", 2)
    assert_equal(audited(VARIANTS["prompts once"]))
    planted_prefixes.count_gradients_once(monkeypatch)
    report = audited(VARIANTS["prompts once"] | {"max_epochs": 1, "train_batch_size": 16})
    assert report.first_difference.quantity.startswith("gradient norm")


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_all_further_options(changes, audited):
    for is_sgd in (False, True):
        assert_equal(audited(changes, sgd=is_sgd, steps=2))


def test_a_group_without_baseline_is_left_out(audited):
    def without(samples):
        greedy = replace(samples.greedy, is_masked=samples.greedy.group_ids == 1)
        return step_world.with_each(
            samples,
            lambda _, item: replace(item, is_masked=item.is_masked or item.rollout.group_id == 1),
            greedy=greedy,
        )

    norm = {"reward_running_norm": True, "reward_running_norm_minus_mean": True, "reward_clip": 1.0}
    changes = {"advantage_estimator": "remax", **norm}
    report = audited(changes, shape=without, steps=2)
    assert_equal(report)
    mask = next(row for row in report.rows if row.quantity == "response mask")
    assert 0 < mask.own < audited(changes).rows[1].own


def undecided(samples):
    return step_world.with_each(
        samples, lambda _, item: ScoredRollout(item.rollout, 0.0, is_masked=True)
    )


@pytest.mark.parametrize("name", ["group_norm", "gae"])
def test_a_step_of_which_nothing_was_decided(name, audited):
    # At this rate an update of nothing would move weights by their decay.
    report = audited({"advantage_estimator": name, "l2": 0.1}, shape=undecided, steps=2)
    assert_equal(report)
    assert next(row for row in report.rows if row.quantity == "schedule position, actor").own == 0


def test_components_of_rewards(audited):
    def with_components(i, item):
        odd = {"odd": i % 5 / 4} if i % 4 else {}
        return replace(item, components={"long": float(i % 3), **odd})

    changes = {"advantage_estimator": "gdpo", "advantage_args": {"components": "long,odd=0.5"}}
    report = audited(changes, shape=lambda samples: step_world.with_each(samples, with_components))
    assert_equal(report)
    found = next(row for row in report.rows if row.quantity == "advantages")
    assert found.own != audited({"advantage_estimator": "gdpo"}).rows[report.rows.index(found)].own
