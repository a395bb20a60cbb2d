"""Responses of several turns, and the slow, obvious float64 program of a step on them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from lightrft.datasets.types import Prompt
from lightrft.engines.types import Completion
from lightrft.records.rollout import Rollout, ScoredRollout, TurnSegment

VOCAB, GROUP = 61, 4


def random_rollout(rng, sample_id, *, num_turns=None, version=2, max_tokens=7):
    """Turns of random ids with observations between them; None draws 1 to 3 turns."""
    prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 6)).tolist())
    ids, logprobs, flags, segments, versions = [], [], [], [], []
    num_turns = num_turns or int(rng.integers(1, 4))
    for turn in range(num_turns):
        sampled = rng.integers(0, VOCAB, rng.integers(1, max_tokens)).tolist()
        observed = rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()
        observed = observed if turn + 1 < num_turns else []
        ids += sampled + observed
        logprobs += (-rng.uniform(0.1, 6.0, len(sampled))).tolist() + [0.0] * len(observed)
        flags += [True] * len(sampled) + [False] * len(observed)
        versions += [version] * len(sampled) + [-1] * len(observed)
        segments.append(TurnSegment(100 * turn + sample_id, 0, tuple(observed)))
    completion = Completion(
        request_id=sample_id // GROUP,
        sample_index=sample_id % GROUP,
        prompt_token_ids=prompt,
        output_token_ids=tuple(ids),
        output_logprobs=tuple(np.float32(logprobs).tolist()),
        logprobs_mode="temperature",
        finish_reason="stop",
        weights_version=version,
        sampled=tuple(flags),
    )
    row = Prompt(id=sample_id // GROUP, text="", token_ids=prompt)
    return Rollout(
        row, completion, sample_id // GROUP, sample_id, "", tuple(versions), tuple(segments)
    )


def random_step(seed, num_rows=8, **keywords):
    """Scored rollouts of one step, with rewards that differ inside every group."""
    rng = np.random.default_rng(seed)
    return [
        ScoredRollout(random_rollout(rng, i, **keywords), float(rng.normal()))
        for i in range(num_rows)
    ]


@dataclass
class Program:
    """One optimizer step in float64, row by row and token by token.

    Args:
        actor, reference, critic: Plain models: [1, tokens] ids -> logits, logits, values.
        temperature, gamma, lambd, kl_coef, entropy_coef, clip: Of the step.
        has_gae: GAE with a KL penalty in the reward, else GRPO with the KL in the loss.
        counts_turns: gamma discounts turns, else tokens.
    """

    actor: object
    reference: object
    critic: object
    temperature: float = 0.8
    gamma: float = 0.9
    lambd: float = 0.7
    kl_coef: float = 0.3
    entropy_coef: float = 0.02
    has_gae: bool = False
    counts_turns: bool = False

    def logprobs(self, model, row):
        """Log-probability and entropy of each sampled token of one row."""
        completion = row.rollout.completion
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        logits = model(torch.tensor([ids]))[0] / self.temperature
        found, entropies = [], []
        for place, is_sampled in enumerate(completion.is_sampled):
            if is_sampled:
                position = len(completion.prompt_token_ids) + place
                distribution = logits[position - 1].log_softmax(-1)
                found.append(distribution[ids[position]])
                entropies.append(-(distribution.exp() * distribution).sum())
        return found, entropies

    def values(self, row):
        """Value of the state each sampled token was drawn in."""
        completion = row.rollout.completion
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        states = self.critic(torch.tensor([ids]))[0]
        start = len(completion.prompt_token_ids)
        return [states[start + i - 1] for i, flag in enumerate(completion.is_sampled) if flag]

    def discounts(self, row):
        """Of the step from each sampled token to the next one; 0 of the last one."""
        flags = row.rollout.completion.is_sampled
        places = [i for i, flag in enumerate(flags) if flag]
        steps = [b - a for a, b in pairwise(places)]
        return [1.0 if self.counts_turns and step == 1 else self.gamma for step in steps] + [0.0]

    def advantages(self, rows):
        """One list a row, and the returns of the critic."""
        if not self.has_gae:
            found = []
            for row in rows:
                group = [r.reward for r in rows if r.rollout.group_id == row.rollout.group_id]
                mean = sum(group) / len(group)
                std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
                whole = (row.reward - mean) / (std + 1e-6)
                # By default discounted per sampled token: an observation takes no time.
                steps = self.discounts(row)[:-1]
                found.append([whole * math.prod(steps[t:]) for t in range(len(steps) + 1)])
            return found, None
        advantages, returns = [], []
        for row in rows:
            with torch.no_grad():
                values = [float(v) for v in self.values(row)]
                policy = [float(x) for x in self.logprobs(self.actor, row)[0]]
                reference = [float(x) for x in self.logprobs(self.reference, row)[0]]
            rewards = [-self.kl_coef * (p - r) for p, r in zip(policy, reference, strict=True)]
            rewards[-1] += row.reward
            following, advantage, own = 0.0, 0.0, []
            # The next state of the last token of a turn is the one after the observation.
            steps = reversed(self.discounts(row))
            for reward, value, step in zip(rewards[::-1], values[::-1], steps, strict=True):
                delta = reward + step * following - value
                advantage = delta + step * self.lambd * advantage
                following = value
                own.insert(0, advantage)
            advantages.append(own)
            returns.append([a + v for a, v in zip(own, values, strict=True)])
        everything = [x for own in advantages for x in own]
        mean = sum(everything) / len(everything)
        std = math.sqrt(sum((x - mean) ** 2 for x in everything) / len(everything))
        return [[(x - mean) / std for x in own] for own in advantages], returns

    def policy_loss(self, rows):
        """Token mean over all sampled tokens of the batch; the first step, so the ratio is 1."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, advantages in zip(rows, self.advantages(rows)[0], strict=True):
            logprobs, entropies = self.logprobs(self.actor, row)
            with torch.no_grad():
                reference = self.logprobs(self.reference, row)[0]
            for t, logprob in enumerate(logprobs):
                ratio = (logprob - logprob.detach()).exp()
                total = total - ratio * advantages[t] - self.entropy_coef * entropies[t]
                if not self.has_gae:
                    d = logprob - reference[t]
                    total = total + self.kl_coef * ((-d).exp() - 1 + d)
                count += 1
        return total / count

    def value_loss(self, rows):
        """Half the squared error, token mean."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, returns in zip(rows, self.advantages(rows)[1], strict=True):
            for value, target in zip(self.values(row), returns, strict=True):
                total, count = total + (value - target) ** 2 / 2, count + 1
        return total / count


def in_float64(model):
    """A copy that computes in float64."""
    return copy.deepcopy(model).double()
