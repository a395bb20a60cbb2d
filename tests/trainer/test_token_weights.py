"""High-entropy tokens and off-policy weights: numerator only, over all ranks."""

import math

import pytest
import torch
from tests.update_inputs import random_experience

from lightrft.algorithms.correction_terms import parse_correction
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import POLICY_LOSSES
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.updates import PolicyUpdate


class OneRank:
    """One rank: its context, and what trains on it."""

    @property
    def context(self):
        return self

    world_size = 1
    dp_group = None

    def gather_objects(self, item, group=None):
        return [item]

    def all_gather(self, data):
        return data


class TwoRanks(OneRank):
    """This rank and another one whose entropies are given."""

    dp_group = object()

    def __init__(self, other):
        self.other = other

    def gather_objects(self, item, group=None):
        assert group is self.dp_group, "ranks that share sequences would count twice"
        return [item, self.other]


def weights_of(rows, training, metrics=None, *, correction=None, high=None, **options):
    terms = () if correction is None else parse_correction(correction, high=high)
    update = PolicyUpdate(
        TrainConfig(**options), POLICY_LOSSES.load("ppo"), training, metrics or StepMetrics(), terms
    )
    return update.token_weights(rows)


def test_batch_scope_keeps_the_upper_share_over_all_ranks():
    rows = random_experience(1)
    mask, entropy = rows.rollouts.response_mask, rows.outputs.entropy
    other = [5.0] * 40  # another rank is far less certain
    metrics = StepMetrics()
    weights = weights_of(rows, TwoRanks(other), metrics, high_entropy_token_ratio=0.25)
    everyone = sorted([*entropy[mask].tolist(), *other])
    position = 0.75 * (len(everyone) - 1)
    low, high = everyone[int(position)], everyone[min(int(position) + 1, len(everyone) - 1)]
    threshold = low + (position - int(position)) * (high - low)
    assert torch.equal(weights.bool(), mask & (entropy >= threshold - 1e-6))
    alone = weights_of(rows, OneRank(), high_entropy_token_ratio=0.25)
    assert alone.sum() > weights.sum()
    share = metrics.reduce(OneRank())["high_entropy_share"]
    assert share == pytest.approx(float(weights.sum() / mask.sum()))


def ratio_to_engine(rows):
    return (rows.outputs.old_logprobs - rows.rollouts.rollout_logprobs).double().exp()


def test_truncated_importance_weights_are_the_capped_ratio_of_trainer_to_engine():
    rows = random_experience(3)
    mask = rows.rollouts.response_mask
    metrics = StepMetrics()
    weights = weights_of(rows, OneRank(), metrics, correction="tis", high=1.5)
    raw = ratio_to_engine(rows)
    expected = torch.where(mask, raw.clamp(max=1.5), 0.0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-9)
    found = metrics.reduce(OneRank())
    inside = expected[mask]
    assert found["correction_weight"] == pytest.approx(float(inside.mean()))
    assert found["correction_raw_weight_max"] == pytest.approx(float(raw[mask].max()))
    assert found["correction_capped_share"] == pytest.approx(
        float((raw[mask] > 1.5).double().mean())
    )
    effective = float(inside.sum() ** 2 / (len(inside) * inside.square().sum()))
    assert found["correction_effective_share"] == pytest.approx(effective)


def test_terms_are_composed_and_weights_of_mean_one_count_all_ranks():
    rows = random_experience(3)
    mask = rows.rollouts.response_mask
    ratio = ratio_to_engine(rows)
    kept = mask & ((ratio - 1 - ratio.log()) <= 0.1)
    correction = ("reject:k3:token:high=0.1", "weight:ratio:token:low=0.7:high=1.5:mean-one")
    other = torch.tensor([30.0, 20.0], dtype=torch.float64)  # twenty tokens that weigh thirty

    class Peer(OneRank):
        def reduce_over_data(self, data, op):
            assert op == "sum"
            return data + other

    weights = weights_of(rows, Peer(), correction=correction)
    held = ratio.clamp(0.7, 1.5)
    mean = (held[mask].sum() + 30) / (mask.sum() + 20)
    expected = torch.where(kept, held / mean, 0.0)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-9)
    assert 0 < kept.sum() < mask.sum()


def test_a_logprob_of_the_engine_that_is_nan_is_left_out_and_counted():
    rows = random_experience(3)
    mask = rows.rollouts.response_mask
    row, t = mask.nonzero()[0].tolist()
    rows.rollouts.rollout_logprobs[row, t] = torch.nan
    metrics = StepMetrics()
    weights = weights_of(rows, OneRank(), metrics, correction="icepop")
    assert weights[row, t] == 0
    assert torch.isfinite(weights).all()
    found = metrics.reduce(OneRank())
    assert found["correction_invalid_share"] == pytest.approx(1 / int(mask.sum()))
    assert math.isfinite(found["correction_raw_weight_max"])


def test_both_multiply():
    rows = random_experience(4)
    both = weights_of(rows, OneRank(), high_entropy_token_ratio=0.5, correction="icepop")
    left = weights_of(rows, OneRank(), high_entropy_token_ratio=0.5)
    right = weights_of(rows, OneRank(), correction="icepop")
    torch.testing.assert_close(both, left * right)


def test_a_correction_with_equal_policies_changes_nothing_and_is_measured(build_world):
    def stepped(**options):
        return build_world(loss_agg_mode="token-mean", **options).step()

    plain, corrected = stepped(), stepped(off_policy_correction="tis")
    assert corrected["correction_weight"] == pytest.approx(1, abs=1e-4)
    assert corrected["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    rejected = stepped(off_policy_correction="icepop", correction_low=0.0, correction_high=0.5)
    assert rejected["correction_rejected_share"] == 1
    assert rejected["grad_norm"] == 0


def test_aliases_of_policy_losses(build_world):
    assert build_world(args={"use_gspo": True}).trainer.config.policy_loss == "gspo"
    assert build_world(use_gspo=True).trainer.config.policy_loss == "gspo"
    assert build_world(args={"use_cpg_loss": True}).trainer.config.policy_loss == "cpgd"
    with pytest.raises(ConfigError, match="cpgd, and policy_loss is gspo"):
        build_world(args={"use_gspo": True, "use_cpg_loss": True})
    with pytest.raises(ConfigError, match="use_gspo is policy_loss gspo, and"):
        build_world(use_gspo=True, policy_loss="gmpo")
    with pytest.raises(ConfigError, match="dual_clip"):
        build_world(policy_loss="gspo", dual_clip=3.0)
    assert build_world(dual_clip=3.0).trainer.config.dual_clip == 3.0
