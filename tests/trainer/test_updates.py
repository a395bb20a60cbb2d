import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from lightrft.algorithms.correction_terms import parse_correction
from lightrft.config import TrainConfig
from lightrft.config.registry import POLICY_LOSSES, bind
from lightrft.models.types import ActorOutput
from lightrft.records.batch import ExperienceBatch, PolicyOutputs, RolloutBatch
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.updates import TrainedModel, Update
from lightrft.strategy.optimizers import OptimizerStepResult

ROWS, SEQ, VOCAB = 8, 9, 11


class TablePolicy(torch.nn.Module):
    """Logits depend on the previous token only: easy to recompute by hand."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator).double())

    def forward(
        self, token_ids, attention_mask, *, scored_mask, temperature, entropy, media, support=None
    ):
        logits = self.table[token_ids[:, :-1]] / temperature
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
        spread = -(logprobs.exp() * logprobs).sum(-1)
        pad = torch.zeros(len(token_ids), 1, dtype=logits.dtype)
        return ActorOutput(
            torch.cat([pad, chosen], 1), torch.cat([pad, spread], 1) if entropy == "grad" else None
        )


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


def experience(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(ROWS, SEQ, generator=generator).double()

    lengths = torch.randint(0, SEQ - 1, (ROWS,), generator=generator)
    lengths[0], lengths[1] = 0, SEQ - 2  # an empty and a long response
    positions = torch.arange(SEQ)[None]
    response_mask = (positions >= 2) & (positions < 2 + lengths[:, None])
    attention_mask = positions < 2 + lengths[:, None]
    token_ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    old = normal() * 0.3 - math.log(VOCAB)
    rollouts = RolloutBatch(
        token_ids,
        attention_mask,
        response_mask,
        torch.zeros(ROWS, SEQ),
        torch.zeros(ROWS),
        torch.arange(ROWS),
        torch.arange(ROWS),
        0.7,
    )
    outputs = PolicyOutputs(old, normal() - math.log(VOCAB), normal(), None)
    return ExperienceBatch(rollouts, outputs, normal(), normal())


def rows_of(batch, rows):
    from lightrft.records.batch import select_experience

    return select_experience(batch, rows)


def slow_weight(mode, batch, row, constant):
    """Weight of one token's loss in the value over the whole batch."""
    lengths = batch.rollouts.response_mask.sum(1).tolist()
    filled = sum(length > 0 for length in lengths)
    return {
        "token-mean": 1 / sum(lengths),
        "seq-mean-token-sum": 1 / filled,
        "seq-mean-token-mean": 1 / (filled * max(lengths[row], 1)),
        "seq-mean-token-sum-norm": 1 / (filled * constant),
    }[mode]


def slow_normalizer(mode, batch, constant):
    lengths = batch.rollouts.response_mask.sum(1)
    filled = int((lengths > 0).sum())
    tokens = int(lengths.sum())
    return {
        "token-mean": tokens,
        "seq-mean-token-sum": filled,
        "seq-mean-token-mean": filled,
        "seq-mean-token-sum-norm": filled * constant,
    }[mode]


def slow_policy_loss(policy, batch, mode, *, kl_coef, entropy_coef, constant):
    """One token after the other, straight from the definitions."""
    total = torch.zeros((), dtype=torch.float64)
    pg = torch.zeros((), dtype=torch.float64)
    rollouts, outputs = batch.rollouts, batch.outputs
    for row in range(ROWS):
        weight = slow_weight(mode, batch, row, constant)
        for t in range(SEQ):
            if not rollouts.response_mask[row, t]:
                continue
            logits = policy.table[rollouts.token_ids[row, t - 1]] / rollouts.temperature
            law = logits.log_softmax(-1)
            p = law[rollouts.token_ids[row, t]]
            ratio = (p - outputs.old_logprobs[row, t]).exp()
            a = batch.advantages[row, t]
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            pg = pg + weight * loss
            d = p - outputs.ref_logprobs[row, t]
            kl = ((-d).exp() - 1 + d).clamp(max=10)
            entropy = -(law.exp() * law).sum()
            total = total + weight * (loss + kl_coef * kl - entropy_coef * entropy)
    return total, pg


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 3), (1, 8), (2, 3), (4, 1)])
def test_gradient_and_loss_equal_the_definition_for_any_split(mode, world_size, micro):
    batch, constant = experience(4), 5
    reference = TablePolicy()
    loss, pg = slow_policy_loss(
        reference, batch, mode, kl_coef=0.3, entropy_coef=0.2, constant=constant
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
    z = torch.tensor(float(slow_normalizer(mode, batch, constant)), dtype=torch.float64)
    policy = TablePolicy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    share = ROWS // world_size
    value = 0.0
    for rank in range(world_size):
        strategy = ManyRanks(world_size, z)
        metrics = StepMetrics()
        Update(config, ppo, strategy, metrics, kl_coef=0.3).policy_step(
            rows_of(batch, slice(rank * share, (rank + 1) * share)),
            TrainedModel("actor", policy, optimizer, None),
        )
        assert strategy.calls.index("all_reduce") < strategy.calls.index("backward")
        assert strategy.calls.count("all_reduce") == 1
        # This rank's sum of shares; the metric divides by its 1 / world_size of a step.
        value += metrics.reduce(strategy)["policy_loss"] / world_size
    assert value == pytest.approx(float(pg.detach()), rel=1e-6)
    torch.testing.assert_close(policy.table.grad, reference.table.grad, rtol=1e-6, atol=1e-9)


def test_a_lost_normalizer_would_be_noticed():
    """Positive control: with Z of one rank's rows the loss is another."""
    batch = experience(4)
    whole = slow_normalizer("token-mean", batch, 5)
    part = slow_normalizer("token-mean", rows_of(batch, slice(0, 4)), 5)
    assert part < 0.9 * whole


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_gradient_equals_the_definition(clip):
    batch = experience(7)
    reference = TableCritic()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        for t in range(SEQ):
            if not batch.rollouts.response_mask[row, t]:
                continue
            v = reference.table[batch.rollouts.token_ids[row, t - 1]]
            old, goal = batch.outputs.values[row, t], batch.returns[row, t]
            error = (v - goal) ** 2
            if clip > 0:
                error = torch.maximum(error, (old + (v - old).clamp(-clip, clip) - goal) ** 2)
            total = total + error / 2
    total = total / int(batch.rollouts.response_mask.sum())
    total.backward()

    critic = TableCritic()
    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=3, value_clip=clip)
    strategy = ManyRanks(1, batch.rollouts.response_mask.sum().double())
    metrics = StepMetrics()
    Update(config, POLICY_LOSSES.load("ppo"), strategy, metrics).value_step(
        batch, TrainedModel("critic", critic, torch.optim.SGD(critic.parameters(), lr=0.1), None)
    )
    assert metrics.reduce(strategy)["critic_loss"] == pytest.approx(float(total), rel=1e-9)
    torch.testing.assert_close(critic.table.grad, reference.table.grad, rtol=1e-9, atol=1e-12)


def test_ratio_metrics_count_tokens():
    batch = experience(4)
    policy = TablePolicy()
    strategy = ManyRanks(1, batch.rollouts.response_mask.sum().double())
    metrics = StepMetrics()
    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=2)
    Update(config, POLICY_LOSSES.load("ppo"), strategy, metrics).policy_step(
        batch, TrainedModel("actor", policy, torch.optim.SGD(policy.parameters(), lr=0.1), None)
    )
    ratios, low, high = [], 0, 0
    for row in range(ROWS):
        for t in range(SEQ):
            if batch.rollouts.response_mask[row, t]:
                logits = policy.table[batch.rollouts.token_ids[row, t - 1]] / 0.7
                p = logits.log_softmax(-1)[batch.rollouts.token_ids[row, t]]
                ratio = float((p - batch.outputs.old_logprobs[row, t]).exp())
                a = float(batch.advantages[row, t])
                ratios.append(ratio)
                low += a < 0 and ratio < 0.8
                high += a > 0 and ratio > 1.2
    found = metrics.reduce(strategy)
    count = len(ratios)
    assert found["ratio_mean"] == pytest.approx(sum(ratios) / count, rel=1e-6)
    assert found["ratio_max"] == pytest.approx(max(ratios), rel=1e-6)
    assert found["clip_fraction_low"] == pytest.approx(low / count)
    assert found["clip_fraction_high"] == pytest.approx(high / count)
    expected = sum(r - 1 - math.log(r) for r in ratios) / count
    assert found["approx_kl"] == pytest.approx(expected, rel=1e-6)


class Stepping(ManyRanks):
    """One rank whose optimizer moves the policy."""

    def optimizer_step(self, optimizer, model, scheduler, name):
        result = super().optimizer_step(optimizer, model, scheduler, name)
        if result is not None:
            optimizer.step()
            optimizer.zero_grad()
        return result


def token_logprob(table, batch, row, t):
    logits = table[batch.rollouts.token_ids[row, t - 1]] / batch.rollouts.temperature
    return logits.log_softmax(-1)[batch.rollouts.token_ids[row, t]]


def kept_by_dppo(new, engine, advantages):
    moved = [float(p.exp() - q.exp()) for p, q in zip(new, engine, strict=True)]
    return [
        move <= 0.02 if a > 0 else move >= -0.02 for move, a in zip(moved, advantages, strict=True)
    ]


def kept_by_off_policy_mask(new, engine, advantages):
    drift = sum(float(q - p) for p, q in zip(new, engine, strict=True)) / len(new)
    return [drift <= 0.05 or sum(advantages) / len(new) >= 0] * len(new)


def slow_trust_region(table, batch, updates, kept):
    """Updates of -ratio A on the tokens that `kept` leaves; also how many they were each time."""
    engine, counts = table.detach().clone(), []
    num_tokens = int(batch.rollouts.response_mask.sum())
    for _ in range(updates):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in range(ROWS):
            places = [t for t in range(SEQ) if batch.rollouts.response_mask[row, t]]
            new = [token_logprob(table, batch, row, t) for t in places]
            old = [token_logprob(engine, batch, row, t) for t in places]
            a = [float(batch.advantages[row, t]) for t in places]
            chosen = kept([p.detach() for p in new], old, a) if places else []
            for p, q, each, is_kept in zip(new, old, a, chosen, strict=True):
                total = total - (p - q).exp() * each * is_kept / num_tokens
                count += is_kept
        (slope,) = torch.autograd.grad(total, table)
        table = (table - 2.0 * slope).detach().requires_grad_()
        counts.append(count)
    return table, counts


@pytest.mark.parametrize(
    ("preset", "kept"),
    [
        (
            "reject:difference:token:high=0.02:positive:new/engine "
            "reject:difference:token:low=-0.02:negative:new/engine",
            kept_by_dppo,
        ),
        ("off-policy-mask:high=0.05", kept_by_off_policy_mask),
    ],
)
@pytest.mark.parametrize("micro", [3, 8])
def test_a_trust_region_bounds_the_policy_that_moves(preset, kept, micro):
    batch, policy = experience(4), TablePolicy()
    mask = batch.rollouts.response_mask
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    for row, t in mask.nonzero().tolist():
        scores[row, t] = token_logprob(policy.table.detach(), batch, row, t)
    batch = replace(
        batch,
        rollouts=replace(batch.rollouts, rollout_logprobs=scores),
        outputs=replace(batch.outputs, old_logprobs=scores),
    )
    expected, counts = slow_trust_region(policy.table, batch, 4, kept)
    assert counts[0] == int(mask.sum())
    assert min(counts) < counts[0]

    config = TrainConfig(loss_agg_mode="token-mean", micro_train_batch_size=micro)
    loss = bind(POLICY_LOSSES.load("ppo"), {"clip_low": 1.0, "clip_high": 1e9}, owner="test")

    def trained(correction):
        model, metrics = TablePolicy(), StepMetrics()
        strategy = Stepping(1, mask.sum().double())
        update = Update(config, loss, strategy, metrics, parse_correction(correction))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        for _ in range(4):
            update.policy_step(batch, TrainedModel("actor", model, optimizer, None))
        return model.table.detach(), metrics.reduce(strategy)

    found, metrics = trained(preset)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    share = 1 - sum(counts) / len(counts) / int(mask.sum())
    assert metrics["correction_rejected_share"] == pytest.approx(share)
    # Looked at before the first update only, nothing is ever too far away.
    still, metrics = trained(preset.replace(":new/engine", "") + ":old/engine")
    assert metrics["correction_rejected_share"] == 0
    assert not torch.allclose(still, expected.detach())
