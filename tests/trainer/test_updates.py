from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.update_inputs import TablePolicy, one_update, random_experience

from lightrft.algorithms.correction_terms import parse_correction
from lightrft.algorithms.corrections import correction_weights
from lightrft.config import TrainConfig
from lightrft.config.registry import POLICY_LOSSES, bind
from lightrft.records.batch import select_experience
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.updates import PolicyUpdate, TrainedModel
from lightrft.strategy.optimizers import OptimizerStepResult

ROWS, SEQ, VOCAB = 8, 9, 11


class TableCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=torch.float64))

    def forward(self, token_ids, attention_mask, *, media):
        pad = torch.zeros(len(token_ids), 1, dtype=torch.float64)
        return torch.cat([pad, self.table[token_ids[:, :-1]]], 1)


class ManyRanks:
    """Accumulates gradients of one rank as the strategies do; Z of all ranks is given."""

    def __init__(self, world_size, total):
        self.world_size = self.num_data_ranks = world_size
        self.total = total
        self.calls = []
        self.context = self

    def reduce_over_data(self, data, op):
        self.calls.append("all_reduce")
        return self.total

    @contextmanager
    def accumulation(self, num_micro_batches, optimizer):
        self.left = num_micro_batches
        yield
        assert self.left == 0

    def backward(self, loss, model, optimizer):
        self.calls.append("backward")
        # Multiplied by the ranks over which gradients are averaged, then averaged.
        (loss * self.world_size / self.world_size).backward()

    def optimizer_step(self, optimizer, model, scheduler, name):
        self.left -= 1
        return OptimizerStepResult(1.0, False, 0.1) if self.left == 0 else None

    def all_gather(self, data):
        return data


def laws(table, batch):
    """[rows, seq - 1, vocabulary] logprobs of what may follow each token."""
    rollouts = batch.rollouts
    return (table[rollouts.token_ids[:, :-1]] / rollouts.temperature).log_softmax(-1)


def token_logprobs(table, batch):
    """[rows, seq] logprobs of the tokens, 0 for the first."""
    chosen = laws(table, batch).gather(-1, batch.rollouts.token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def normalizer(mode, batch, constant):
    lengths = batch.rollouts.response_mask.sum(1)
    filled = int((lengths > 0).sum())
    by_mode = {"token-mean": int(lengths.sum()), "seq-mean-token-sum-norm": filled * constant}
    return by_mode.get(mode, filled)


def policy_loss(table, batch, mode, *, kl_coef, entropy_coef, constant):
    """The loss and the part of the clipped objective, straight from the definitions."""
    mask, outputs = batch.rollouts.response_mask, batch.outputs
    shares = mask / normalizer(mode, batch, constant)
    if mode == "seq-mean-token-mean":
        shares = shares / mask.sum(1, keepdim=True).clamp(min=1)
    new = token_logprobs(table, batch)
    ratio, a = (new - outputs.old_logprobs).exp(), batch.advantages
    clipped = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    d = new - outputs.ref_logprobs
    kl = ((-d).exp() - 1 + d).clamp(max=10)
    law = laws(table, batch)
    entropy = torch.nn.functional.pad(-(law.exp() * law).sum(-1), (1, 0))
    total = clipped + kl_coef * kl - entropy_coef * entropy
    return (shares * total).sum(), (shares * clipped).sum()


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("world_size, micro", [(1, 1), (1, 3), (1, 8), (2, 3), (4, 1)])
def test_gradient_and_loss_equal_the_definition_for_any_split(mode, world_size, micro):
    batch, constant = random_experience(4), 5
    reference = TablePolicy(VOCAB)
    loss, pg = policy_loss(
        reference.table, batch, mode, kl_coef=0.3, entropy_coef=0.2, constant=constant
    )
    loss.backward()

    config = TrainConfig(
        loss_agg_mode=mode,
        generate_max_len=constant,
        micro_train_batch_size=micro,
        kl_estimator="k3",
        entropy_coef=0.2,
    )
    ppo = bind(POLICY_LOSSES.load("ppo"), {"clip_low": 0.2, "clip_high": 0.28}, owner="test")
    z = torch.tensor(float(normalizer(mode, batch, constant)), dtype=torch.float64)
    policy = TablePolicy(VOCAB)
    share = ROWS // world_size
    value = 0.0
    for rank in range(world_size):
        training = ManyRanks(world_size, z)
        rows = select_experience(batch, slice(rank * share, (rank + 1) * share))
        metrics = one_update(policy, rows, config, training=training, loss=ppo, kl_coef=0.3)
        assert training.calls.index("all_reduce") < training.calls.index("backward")
        assert training.calls.count("all_reduce") == 1
        # This rank's sum of shares; the metric divides by its 1 / world_size of a step.
        value += metrics["policy_loss"] / world_size
    assert value == pytest.approx(float(pg.detach()), rel=1e-6)
    torch.testing.assert_close(policy.table.grad, reference.table.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_gradient_equals_the_definition(clip):
    batch = random_experience(7)
    reference = TableCritic()
    values = torch.nn.functional.pad(reference.table[batch.rollouts.token_ids[:, :-1]], (1, 0))
    old, mask = batch.outputs.values, batch.rollouts.response_mask
    errors = (values - batch.returns) ** 2
    if clip > 0:
        bounded = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (bounded - batch.returns) ** 2)
    total = errors[mask].mean() / 2
    total.backward()

    critic = TableCritic()
    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=3, value_clip=clip)
    training = ManyRanks(1, batch.rollouts.response_mask.sum().double())
    metrics = one_update(critic, batch, config, training=training, step="value_step")
    assert metrics["critic_loss"] == pytest.approx(float(total.detach()), rel=1e-9)
    torch.testing.assert_close(critic.table.grad, reference.table.grad, rtol=1e-9, atol=1e-12)


def test_ratio_metrics_count_tokens():
    batch = random_experience(4)
    policy = TablePolicy(VOCAB)
    training = ManyRanks(1, batch.rollouts.response_mask.sum().double())
    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=2)
    found = one_update(policy, batch, config, training=training)
    mask = batch.rollouts.response_mask
    ratios = (token_logprobs(policy.table.detach(), batch) - batch.outputs.old_logprobs).exp()[mask]
    a = batch.advantages[mask]
    expected = {
        "ratio_mean": float(ratios.mean()),
        "ratio_max": float(ratios.max()),
        "clip_fraction_low": float(((a < 0) & (ratios < 0.8)).double().mean()),
        "clip_fraction_high": float(((a > 0) & (ratios > 1.2)).double().mean()),
        "approx_kl": float((ratios - 1 - ratios.log()).mean()),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


class Stepping(ManyRanks):
    """One rank whose optimizer moves the policy."""

    def optimizer_step(self, optimizer, model, scheduler, name):
        result = super().optimizer_step(optimizer, model, scheduler, name)
        if result is not None:
            optimizer.step()
            optimizer.zero_grad()
        return result


def in_trust_region(table, batch, terms, *, updates):
    """Updates of -ratio A on the tokens that are kept each time; also how many those were."""
    mask, engine, counts = batch.rollouts.response_mask, batch.outputs.old_logprobs, []
    for _ in range(updates):
        new = token_logprobs(table, batch)
        kept = correction_weights(
            engine,
            engine,
            mask,
            terms=terms,
            advantages=batch.advantages,
            new_logprobs=new.detach(),
        ).weights
        loss = -((new - engine).exp() * batch.advantages * kept)[mask].sum() / mask.sum()
        (slope,) = torch.autograd.grad(loss, table)
        table = (table - 2.0 * slope).detach().requires_grad_()
        counts.append(int((kept > 0).sum()))
    return table, counts


@pytest.mark.parametrize(
    "preset",
    [
        "reject:difference:token:high=0.02:positive:new/engine "
        "reject:difference:token:low=-0.02:negative:new/engine",
        "off-policy-mask:high=0.05",
    ],
)
@pytest.mark.parametrize("micro", [3, 8])
def test_a_trust_region_bounds_the_policy_that_moves(preset, micro):
    batch, policy = random_experience(4), TablePolicy(VOCAB)
    mask = batch.rollouts.response_mask
    scores = token_logprobs(policy.table.detach(), batch)
    batch = replace(
        batch,
        rollouts=replace(batch.rollouts, rollout_logprobs=scores),
        outputs=replace(batch.outputs, old_logprobs=scores),
    )
    expected, counts = in_trust_region(policy.table, batch, parse_correction(preset), updates=4)
    assert counts[0] == int(mask.sum())
    assert min(counts) < counts[0]

    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=micro)
    loss = bind(POLICY_LOSSES.load("ppo"), {"clip_low": 1.0, "clip_high": 1e9}, owner="test")

    def trained(correction):
        model, metrics = TablePolicy(VOCAB), StepMetrics()
        training = Stepping(1, mask.sum().double())
        update = PolicyUpdate(config, loss, training, metrics, parse_correction(correction))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        for _ in range(4):
            update.policy_step(batch, TrainedModel("actor", model, optimizer, None))
        return model.table.detach(), metrics.reduce(training)

    found, metrics = trained(preset)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    share = 1 - sum(counts) / len(counts) / int(mask.sum())
    assert metrics["correction_rejected_share"] == pytest.approx(share)
    # Looked at before the first update only, nothing is ever too far away.
    still, metrics = trained(preset.replace(":new/engine", "") + ":old/engine")
    assert metrics["correction_rejected_share"] == 0
    assert not torch.allclose(still, expected.detach())
