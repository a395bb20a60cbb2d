"""What an update of a policy is computed from: rows of samples, and a policy that is a table."""

import math

import numpy as np
import torch

from lightrft.config.registry import POLICY_LOSSES
from lightrft.models.types import ActorOutput
from lightrft.records.batch import ExperienceBatch, PolicyOutputs, RolloutBatch
from lightrft.records.table import SampleTable
from lightrft.stages.metrics import StepMetrics
from lightrft.stages.policy.updates import PolicyUpdate, TrainedModel
from lightrft.strategy import get_fake_strategy


def sample_table(lengths, *, prompt_length=2, **columns):
    """Return samples of these numbers of tokens, whole and of one version, in groups of four.

    Args:
        lengths: Tokens of each response.
        prompt_length: Tokens of each prompt.
        columns: Of the table, where they are not those of rows of zeros.
    """
    lengths = np.asarray(lengths)
    rows, num_tokens = len(lengths), int(lengths.sum())
    rewards = np.asarray(columns.pop("rewards", np.zeros(rows)), dtype=np.float64)
    usual = {
        "sample_ids": np.arange(rows),
        "group_ids": np.arange(rows) // 4,
        "prompt_lengths": np.full(rows, prompt_length),
        "response_lengths": lengths,
        "token_ids": np.zeros(num_tokens + prompt_length * rows, dtype=np.int64),
        "rollout_logprobs": np.zeros(num_tokens, np.float32),
        "is_sampled": np.ones(num_tokens, bool),
        "rewards": rewards,
        "accuracies": rewards,
        "component_names": (),
        "components": np.zeros((rows, 0)),
        "is_truncated": np.zeros(rows, bool),
        "is_masked": np.zeros(rows, bool),
        "is_untruncated": np.ones(rows, bool),
        "weights_versions": np.zeros(rows, np.int64),
        "token_versions": np.zeros(num_tokens, np.int64),
        "sampled_lengths": lengths,
        "has_mixed_versions": np.zeros(rows, bool),
        "holders": np.zeros(rows, np.int64),
    }
    return SampleTable(**usual | columns)


class TablePolicy(torch.nn.Module):
    """Logits in float64 that follow from the previous token alone: easy to recompute by hand.

    Args:
        vocab: Number of tokens.
        dtype: Of the weights; strategies measure gradients in float32.
    """

    def __init__(self, vocab, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(vocab, vocab, generator=generator).to(dtype))

    def forward(
        self, token_ids, attention_mask, *, scored_mask=None, temperature=1.0, entropy="", **_
    ):
        logprobs = (self.table.double()[token_ids[:, :-1]] / temperature).log_softmax(-1)
        chosen = logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
        mask = attention_mask if scored_mask is None else scored_mask
        spread = -(logprobs.exp() * logprobs).sum(-1)
        pad = torch.nn.functional.pad
        return ActorOutput(
            pad(chosen if mask is None else chosen * mask[:, 1:], (1, 0)),
            pad(spread, (1, 0)) if entropy == "grad" else None,
        )


def random_experience(seed, *, rows=8, seq=9, vocab=11):
    """Return rows of two tokens of a prompt and 0 to seq - 2 of a response, in float64.

    The first response is empty, the second as long as may be; engine, policy of before, reference
    and critic say something random of each token.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, seq, generator=generator).double()

    lengths = torch.randint(0, seq - 1, (rows, 1), generator=generator)
    lengths[0], lengths[1] = 0, seq - 2
    positions = torch.arange(seq)[None]
    attention_mask = positions < 2 + lengths
    mask = attention_mask & (positions >= 2)
    token_ids = torch.randint(0, vocab, (rows, seq), generator=generator)
    old = torch.where(mask, normal() * 0.3 - math.log(vocab), 0.0)
    engine = torch.where(mask, old + 0.5 * normal(), 0.0)
    numbers = torch.arange(rows)
    rollouts = RolloutBatch(
        token_ids, attention_mask, mask, engine, torch.zeros(rows), numbers, numbers, 0.7
    )
    reference, values, entropy = normal() - math.log(vocab), normal(), normal().abs() * mask
    outputs = PolicyOutputs(old, reference, values, entropy)
    return ExperienceBatch(rollouts, outputs, normal(), normal())


def one_update(
    model, batch, config, *, training=None, loss=None, step="policy_step", rate=0.1, **options
):
    """Carry out one optimizer step of gradient descent; return its metrics.

    Args:
        model: Gets the step.
        batch: Its rows.
        config: Options of the update.
        training: That of one process if None.
        loss: A policy loss; that of PPO if None.
        step: "policy_step" or "value_step".
        rate: Learning rate.
        options: Further arguments of `PolicyUpdate`.
    """
    training, metrics = training or get_fake_strategy(config).training, StepMetrics()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    update = PolicyUpdate(config, loss or POLICY_LOSSES.load("ppo"), training, metrics, **options)
    getattr(update, step)(batch, TrainedModel("model", model, optimizer, None))
    return metrics.reduce(training.context)
