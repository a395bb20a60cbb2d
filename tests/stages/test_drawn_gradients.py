"""With importance weights the mean gradient of any drawing is that of drawing all prompts alike.

Enumerated: all orders of a small set and all turns of the points between two borders; the loss is
the product's own, in float64.
"""

from itertools import pairwise, permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightrft.algorithms.policy.clipped import clipped_policy_loss
from lightrft.config import TrainConfig
from lightrft.datasets.pass_rates import PassRate
from lightrft.datasets.prompt_sampler import GroupResult, RowChoice, SampledRows, build_sampler
from lightrft.datasets.types import Prompt
from lightrft.records.batch import ExperienceBatch, PolicyOutputs, RolloutBatch
from lightrft.stages.policy.objective import LossTokens, PolicyObjective

NUM_PROMPTS, SIZE, GROUP, SEQ = 4, 2, 2, 5
PROMPTS = [Prompt(i, "", (i,)) for i in range(NUM_PROMPTS)]
CONTEXT = SimpleNamespace(rank=0, world_size=1)


def weighted():
    rows = RowChoice(
        NUM_PROMPTS, 0, SIZE, needs_probabilities=True, weights=np.array([0.4, 0.3, 0.2, 0.1])
    )
    return TrainConfig(prompt_weight="w"), rows, ()


def by_rates():
    rates = [PassRate(n, 4) for n in (0, 1, 2, 4)]
    rows = RowChoice(NUM_PROMPTS, 0, SIZE, needs_probabilities=True, rates=rates)
    return TrainConfig(prompt_sampler="weighted"), rows, ()


def pools():
    rows = RowChoice(NUM_PROMPTS, 0, SIZE, has_rewards=True, needs_probabilities=True)
    results = [GroupResult(0, (1, 1), (1, 1)), GroupResult(2, (0, 0), (0, 0))]
    return TrainConfig(prompt_sampler="pools"), rows, results


def gradient_of(drawn, logits):
    """Gradient of a step on these prompts, each with samples of its own."""
    torch.manual_seed(0)
    tokens = torch.randint(7, (NUM_PROMPTS, GROUP, SEQ))
    advantages = torch.randn(NUM_PROMPTS, GROUP, 1, dtype=torch.float64)
    lengths = torch.randint(1, SEQ + 1, (NUM_PROMPTS, GROUP, 1))
    places = [prompt.id for prompt in drawn]
    rows = len(places) * GROUP
    chosen = torch.arange(SEQ) < lengths[places]
    mask = chosen.reshape(rows, SEQ)
    old = torch.log_softmax(torch.randn(7, dtype=torch.float64), 0)[tokens[places]]
    scored = torch.log_softmax(logits, -1)[tokens[places]].reshape(rows, SEQ) * mask
    weights = torch.tensor([p.draw_weight for p in drawn for _ in range(GROUP)])
    batch = RolloutBatch(
        token_ids=tokens[places].reshape(rows, SEQ),
        attention_mask=mask,
        response_mask=mask,
        rollout_logprobs=old.reshape(rows, SEQ),
        rewards=torch.zeros(rows),
        group_ids=torch.arange(rows),
        sample_ids=torch.arange(rows),
        temperature=1.0,
        draw_weights=weights.double(),
    )
    reference = torch.log_softmax(torch.arange(7.0, dtype=torch.float64), 0)
    outputs = PolicyOutputs(
        old.reshape(rows, SEQ) * mask,
        reference[tokens[places]].reshape(rows, SEQ) * mask,
        None,
        None,
    )
    spread = advantages[places].expand(-1, -1, SEQ).reshape(rows, SEQ) * mask
    experience = ExperienceBatch(batch, outputs, spread, spread)
    config = TrainConfig(use_kl_loss=True, init_kl_coef=0.1)
    tokens_of = LossTokens.of(
        experience, mode="seq-mean-token-mean", factors=None, row_weights=batch.draw_weights
    )

    def loss(*args):
        return clipped_policy_loss(*args, clip_low=0.2, clip_high=0.3)

    normalizer = torch.tensor(float(SIZE * GROUP), dtype=torch.float64)
    value, *_ = PolicyObjective(config, loss, normalizer, 0.1).terms(tokens_of, scored, None)
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


def drawn_at(config, rows, results, order, turn):
    """Prompts of a step where the random numbers are these."""
    numbers = SimpleNamespace(permutation=lambda _: np.array(order), random=lambda: turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowChoice, "generator", lambda *_: numbers)
        stream = SampledRows(PROMPTS, config, rows, CONTEXT).stream(0, 0, "")
        stream.observe(results)
        return stream.next_batch()


def mean_gradient(config, rows, results, logits):
    """Mean over all orders, and over all turns, between whose borders the drawn rows are equal."""
    shares, known, total = {}, {}, torch.zeros_like(logits)
    for turn in np.linspace(0, 0.99, 50):
        for prompt in drawn_at(config, rows, results, range(NUM_PROMPTS), turn):
            shares[prompt.id] = prompt.draw_probability
    assert sum(shares.values()) == pytest.approx(1)
    orders = list(permutations(range(NUM_PROMPTS)))
    for order in orders:
        stops = SIZE * np.cumsum([shares[place] for place in order])
        borders = sorted({0.0, 1.0, *(stops % 1).tolist()})
        for start, stop in pairwise(borders):
            drawn = drawn_at(config, rows, results, order, (start + stop) / 2)
            key = tuple(prompt.id for prompt in drawn)
            if key not in known:
                known[key] = gradient_of(drawn, logits)
            total += (stop - start) * known[key]
    return total / len(orders)


@pytest.mark.parametrize("make", [weighted, by_rates, pools])
def test_the_mean_gradient_is_that_of_drawing_all_alike(make):
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits.requires_grad_()
    every = gradient_of(PROMPTS, logits) * SIZE / NUM_PROMPTS
    config, rows, results = make()
    assert build_sampler(config, rows).draw(SIZE)
    found = mean_gradient(config, rows, results, logits)
    assert float((found - every).abs().max()) < 1e-6 * float(every.abs().max())


def test_without_the_weights_it_is_another():
    logits = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    every = gradient_of(PROMPTS, logits)
    heavy = [Prompt(0, "", (0,))] * 4
    assert float((gradient_of(heavy, logits) - every).abs().max()) > 1e-3
