"""Rows, masks and shaped rewards from raw completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightrft.config import TrainConfig
from lightrft.config.parts.rollout import ShapingOptions
from lightrft.tools.audit.record import CUT, KEPT, RAGGED, ROUTES, RawSamples, RecordError


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a step, padded on the right.

    Args:
        is_token: Tokens that are no padding: [rows, seq] bool.
        ids: Tokens of prompt and response: [rows, seq] int64.
        mask: Sampled tokens that are trained on: [rows, seq] bool.
        is_kept: Rows that are trained on: [rows] bool.
        rollout_logprobs: Logprobs of the engine, 0 outside the mask: [rows, seq].
    """

    is_token: Tensor
    ids: Tensor
    mask: Tensor
    is_kept: Tensor
    rollout_logprobs: Tensor

    @property
    def lengths(self) -> Tensor:
        """Number of tokens: [rows]."""
        return self.is_token.sum(dim=1)

    def padded(self, flat: np.ndarray) -> Tensor:
        """Return a flat per-token array as [rows, seq], 0 on padding; empty stays empty."""
        return padded(flat, self.is_token)


def padded(flat: np.ndarray, is_token: Tensor) -> Tensor:
    """Return a flat per-token array as [rows, seq], 0 on padding; empty stays empty."""
    values = torch.from_numpy(flat)
    values = values.double() if values.is_floating_point() else values
    if not len(values):
        return values.reshape(0, 0)
    wide = torch.zeros(is_token.shape, dtype=values.dtype)
    wide[is_token] = values
    return wide


def build_rows(samples: RawSamples, config: ShapingOptions) -> Rows:
    """Build rows and masks from raw completions."""
    is_token, starts = _token_places(samples), torch.from_numpy(samples.prompt_lengths)[:, None]
    places = torch.arange(is_token.shape[1])
    is_kept = torch.from_numpy(~samples.is_failed)
    if config.advantage_estimator == "remax":
        # Without a greedy baseline a row has no advantage.
        is_kept = is_kept & torch.from_numpy(np.isfinite(samples.greedy_rewards))
    if config.dynamic_sampling:
        is_kept = is_kept & _is_informative(samples, is_kept)
    # Observations within a response are context: the policy did not sample them.
    mask = padded(samples.is_sampled, is_token) & (places >= starts) & is_kept[:, None]
    if config.mask_truncated:
        mask &= torch.from_numpy(~samples.facts[CUT].astype(np.bool_))[:, None]
    ids = padded(samples.token_ids, is_token).long()
    logprobs = torch.where(mask, padded(samples.rollout_logprobs, is_token), 0.0)
    return Rows(is_token, ids, mask, is_kept, logprobs)


def kept_ids(samples: RawSamples) -> dict[int, list[Tensor]]:
    """Return by row the ids that truncated sampling kept for each token of the response.

    Rows without any are missing; an id list of a token without a record is empty.

    Raises:
        RecordError: They are not so many as the record says, or lack the sampled token.
    """
    kept, ends = {}, np.cumsum(samples.prompt_lengths + samples.response_lengths)
    for row, values in _ragged(samples, KEPT).items():
        length = int(samples.response_lengths[row])
        sizes, ids = values[:length].tolist(), values[length:].long()
        drawn = samples.token_ids[ends[row] - length : ends[row]].tolist()
        is_right = len(sizes) == length and min(sizes) >= 0 and sum(sizes) == len(ids)
        sets = list(torch.split(ids, sizes)) if is_right else []
        if not is_right or any(len(s) and t not in s for s, t in zip(sets, drawn, strict=True)):
            raise RecordError(
                f"the record is damaged: the kept ids of sample {samples.sample_ids[row]} are not "
                "those of its tokens; audit another step with --step"
            )
        kept[row] = sets
    return kept


def routes(samples: RawSamples) -> dict[int, Tensor]:
    """Return by row the bytes of the experts of every position but the last: [positions, bytes]."""
    lengths = samples.prompt_lengths + samples.response_lengths
    parts = _ragged(samples, ROUTES)
    return {row: values.reshape(int(lengths[row]) - 1, -1) for row, values in parts.items()}


def _ragged(samples: RawSamples, name: str) -> dict[int, Tensor]:
    """Return the values of a column by row, of rows that have some."""
    counts = samples.facts.get(RAGGED[name], np.zeros(0)).astype(np.int64)
    parts = np.split(samples.facts.get(name, np.zeros(0)), np.cumsum(counts))
    return {row: torch.from_numpy(parts[row]) for row in np.flatnonzero(counts).tolist()}


def differ(rewards: Tensor) -> bool:
    """Return whether rewards of a group are not all equal, up to the rounding of a weighted sum."""
    if len(rewards) < 2:
        return False
    return float(rewards.max() - rewards.min()) > 1e-13 * (2 * float(rewards.abs().max()) + 1e-3)


def _is_informative(samples: RawSamples, is_kept: Tensor) -> Tensor:
    """Return rows of groups whose accuracies differ; others only fill up the batch."""
    groups, accuracies = map(torch.from_numpy, (samples.group_ids, samples.accuracies))
    informative = torch.zeros(len(groups), dtype=torch.bool)
    for group in set(groups.tolist()):
        is_member = groups == group
        informative[is_member] = differ(accuracies[is_member & is_kept])
    return informative


def paid_rewards(samples: RawSamples, config: TrainConfig) -> tuple[Tensor, float]:
    """Return rewards minus the overlong penalty, and the largest sum of their terms' sizes.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    rewards = torch.from_numpy(samples.rewards)
    size = float(rewards.abs().max())
    if config.overlong_buffer:
        begin = config.generate_max_len - config.overlong_buffer_len
        share = ((_longest_turns(samples) - begin) / config.overlong_buffer_len).clamp(0, 1)
        penalty = config.overlong_buffer_penalty_factor
        rewards = rewards - torch.where(torch.from_numpy(samples.is_failed), 0.0, penalty * share)
        size += penalty
    return rewards, size


def merged_moments(moments: Sequence[float], rewards: Tensor) -> list[float]:
    """Return count, mean and squared deviations of earlier rewards and new ones."""
    count, mean, squares = moments
    total = count + len(rewards)
    grand = (count * mean + float(rewards.sum())) / max(total, 1)
    squares += count * (mean - grand) ** 2 + float(((rewards - grand) ** 2).sum())
    return [total, grand, squares]


def shaped_rewards(
    samples: RawSamples, is_kept: Tensor, config: TrainConfig, moments: Sequence[float]
) -> tuple[Tensor, Tensor, float]:
    """Return shaped rewards, shaped greedy rewards, and the largest sum of their terms' sizes.

    Shaping is the overlong penalty, running scale and clip. Greedy baselines get the same scale and
    clip as rewards, but do not count in the running moments.
    """
    rewards, size = paid_rewards(samples, config)
    both = torch.stack([rewards, torch.from_numpy(samples.greedy_rewards)])
    if config.reward_running_norm:
        total, mean, squares = merged_moments(moments, rewards[is_kept])
        is_constant = total < 2 or squares <= total * (1e-14 * mean) ** 2
        scale = 1.0 if is_constant else math.sqrt(squares / (total - 1))
        shift = mean if config.reward_running_norm_minus_mean else 0.0
        both = (both - shift) / scale
        size = (size + abs(shift)) / scale
    if config.reward_clip > 0:
        both = both.clamp(-config.reward_clip, config.reward_clip)
    return both[0], both[1], size


def sampled_rows(samples: RawSamples) -> Tensor:
    """Return which tokens were sampled: [rows, seq] bool."""
    return padded(samples.is_sampled, _token_places(samples))


def _token_places(samples: RawSamples) -> Tensor:
    """Return which places of the padded rows have a token: [rows, seq] bool."""
    lengths = torch.from_numpy(samples.prompt_lengths + samples.response_lengths)[:, None]
    return torch.arange(int(lengths.max())) < lengths


def _longest_turns(samples: RawSamples) -> Tensor:
    """Return the length of the longest run of sampled tokens in each row."""
    is_sampled = sampled_rows(samples)
    count = is_sampled.cumsum(dim=1)
    before = torch.where(is_sampled, 0, count).cummax(dim=1).values
    return (count - before).amax(dim=1).double()
