"""From the flags to the value of the loss, against float64 programs of the papers."""

import numpy as np
import pytest
import torch
from tests.algorithms.paper_losses import PAPER_LOSSES, rows_of
from tests.update_inputs import TablePolicy, one_update, sample_table

from lightrft.cli.options import parse_options
from lightrft.cli.train import build_parser
from lightrft.config.registry import POLICY_LOSSES
from lightrft.records.batch import ExperienceBatch, PolicyOutputs, collate
from lightrft.stages.policy.algorithm import decide

VOCAB, ROWS = 23, 12


def experience(policy):
    """Ragged rows, one of them without tokens, with ratios far beyond every clip range."""
    draw = np.random.default_rng(3)
    lengths = np.append(draw.integers(1, 30, ROWS - 1), 0)
    num_tokens = int(lengths.sum())
    ids = draw.integers(0, VOCAB, num_tokens + 2 * ROWS)
    table = sample_table(lengths, token_ids=ids)
    rollouts = collate(table, temperature=1.0, device=torch.device("cpu"))
    mask = rollouts.response_mask
    with torch.no_grad():
        new = policy(rollouts.token_ids, None).logprobs * mask
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    old = (new + 0.3 * noise) * mask
    advantages = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * mask
    outputs = PolicyOutputs(old, None, None, None)
    return ExperienceBatch(rollouts, outputs, advantages, advantages), new


def loss_of(*flags):
    """The value of the policy loss of one optimizer batch, and what the papers get as inputs."""
    argv = ["--rollout_batch_size", "3", "--n_samples_per_prompt", "4", "--train_batch_size", "12"]
    config, _, problems = parse_options(build_parser(), [*argv, "--init_kl_coef", "0", *flags])
    assert problems == []
    config, algorithm = decide(config)
    policy = TablePolicy(VOCAB, torch.float32)
    batch, new = experience(policy)
    how = {"loss": algorithm.policy_loss, "corrections": algorithm.corrections, "rate": 0.0}
    metrics = one_update(policy, batch, config, **how)
    inputs = (new, batch.outputs.old_logprobs, batch.advantages, batch.rollouts.response_mask)
    return metrics["policy_loss"], rows_of(*inputs)


CASES = [
    *((name, (), {}) for name in POLICY_LOSSES),
    ("ppo", ("--eps_clip", "0.1"), {"clip_low": 0.1, "clip_high": 0.1}),
    ("dapo", ("--eps_clip_low", "0.1"), {"clip_low": 0.1}),
    ("ppo", ("--dual_clip", "1.3"), {"dual_clip": 1.3}),
    # An explicit value counts, also where it equals another loss's usual one.
    ("gspo", ("--eps_clip", "0.2"), {"clip_low": 0.2, "clip_high": 0.2}),
    ("gmpo", ("--policy_loss_args", "max_log_ratio=0.2"), {"max_log_ratio": 0.2}),
    (
        "gmpo",
        ("--policy_loss_args", "max_log_ratio=0.3", "max_log_fall=0.1"),
        {"max_log_ratio": 0.3, "max_log_fall": 0.1},
    ),
    ("dro", ("--policy_loss_args", "penalty=2"), {"penalty": 2.0}),
    (
        "sapo",
        ("--policy_loss_args", "temperature_positive=2", "temperature_negative=3"),
        {"temperature_positive": 2.0, "temperature_negative": 3.0},
    ),
    (
        "cpgd",
        ("--policy_loss_args", "drift_coef=0.5", "drift_cap=1.5"),
        {"drift_coef": 0.5, "drift_cap": 1.5},
    ),
]


@pytest.mark.parametrize("name, flags, options", CASES)
def test_the_flags_give_the_papers_loss_with_its_aggregation(name, flags, options):
    if name == "dr_grpo":  # its divisor is the token budget of a response
        flags, options = (*flags, "--generate_max_len", "40"), {"max_response_tokens": 40}
    rows = "12" if name in ("clip_cov", "kl_cov") else "4"  # these couple the rows they see
    found, rows = loss_of("--policy_loss", name, "--micro_train_batch_size", rows, *flags)
    assert found == pytest.approx(PAPER_LOSSES[name](rows, **options), rel=1e-6, abs=1e-9)


def test_a_given_aggregation_is_never_overridden():
    chosen, rows = loss_of("--policy_loss", "dapo", "--loss_agg_mode", "seq-mean-token-mean")
    expected = PAPER_LOSSES["ppo"](rows, clip_low=0.2, clip_high=0.28)
    assert chosen == pytest.approx(expected, rel=1e-6)
    own, _ = loss_of("--policy_loss", "dapo")
    assert own != pytest.approx(chosen, rel=1e-3)
