"""Rows, masks and shaped rewards from raw completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightrft.config import TrainConfig
from lightrft.config.parts.rollout import ShapingOptions
from lightrft.tools.audit.record import CUT, Array, Flags, Integers, RawSamples, rows_of


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a step, padded on the right.

    Args:
        ids: Tokens of prompt and response: [rows, seq] int64.
        lengths: Number of tokens: [rows].
        mask: Sampled tokens that are trained on: [rows, seq] bool.
        is_kept: Rows that are trained on: [rows] bool.
        rollout_logprobs: Logprobs of the engine, 0 outside the mask: [rows, seq].
    """

    ids: Integers
    lengths: Integers
    mask: Flags
    is_kept: Flags
    rollout_logprobs: Array

    def padded(self, flat: np.ndarray) -> np.ndarray:
        """Return a flat per-token array as [rows, seq], 0 on padding; empty stays empty."""
        if flat.size == 0:
            return flat.reshape(0, 0)
        wide = np.zeros(self.ids.shape, dtype=flat.dtype)
        for row, where in enumerate(rows_of(self.lengths)):
            wide[row, : self.lengths[row]] = flat[where]
        return wide.astype(np.float64) if flat.dtype == np.float32 else wide


def build_rows(samples: RawSamples, config: ShapingOptions) -> Rows:
    """Build rows and masks from raw completions."""
    lengths = samples.prompt_lengths + samples.response_lengths
    width = int(lengths.max()) if len(lengths) else 0
    places = np.arange(width)[None, :]
    is_response = (places >= samples.prompt_lengths[:, None]) & (places < lengths[:, None])
    is_kept = ~samples.is_failed
    if config.advantage_estimator == "remax":
        # Without a greedy baseline a row has no advantage.
        is_kept = is_kept & np.isfinite(samples.greedy_rewards)
    if config.dynamic_sampling:
        is_kept = is_kept & _is_informative(samples, is_kept)
    empty = np.zeros(is_response.shape, dtype=np.bool_)
    rows = Rows(np.zeros(empty.shape, np.int64), lengths, empty, is_kept, np.zeros(0))
    # Observations within a response are context: the policy did not sample them.
    mask = is_response & rows.padded(samples.is_sampled) & is_kept[:, None]
    if config.mask_truncated:
        mask &= ~samples.facts[CUT].astype(np.bool_)[:, None]
    ids = rows.padded(samples.token_ids.astype(np.int64))
    logprobs = np.where(mask, rows.padded(samples.rollout_logprobs), 0.0)
    return Rows(ids, lengths, mask, is_kept, logprobs)


def differ(rewards: Array) -> bool:
    """Return whether rewards of a group are not all equal, up to the rounding of a weighted sum."""
    size = 2 * np.abs(rewards).max(initial=0.0) + 1e-3
    return len(rewards) > 1 and float(np.ptp(rewards)) > 1e-13 * size


def _is_informative(samples: RawSamples, is_kept: Flags) -> Flags:
    """Return rows of groups whose accuracies differ; others only fill up the batch."""
    informative = np.zeros(len(samples.group_ids), dtype=np.bool_)
    for group in np.unique(samples.group_ids):
        is_member = samples.group_ids == group
        scored = samples.accuracies[is_member & is_kept]
        informative[is_member] = differ(scored)
    return informative


def paid_rewards(samples: RawSamples, config: TrainConfig) -> tuple[Array, float]:
    """Return rewards minus the overlong penalty, and the largest sum of their terms' sizes.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    rewards = samples.rewards.copy()
    size = float(np.abs(rewards).max(initial=0.0))
    if config.overlong_buffer:
        begin = config.generate_max_len - config.overlong_buffer_len
        share = np.clip((_longest_turns(samples) - begin) / config.overlong_buffer_len, 0, 1)
        is_paid = ~samples.is_failed
        rewards[is_paid] -= config.overlong_buffer_penalty_factor * share[is_paid]
        size += config.overlong_buffer_penalty_factor
    return rewards, size


def merged_moments(moments: Sequence[float], rewards: Array) -> list[float]:
    """Return count, mean and squared deviations of earlier rewards and new ones."""
    count, mean, squares = moments
    total = count + len(rewards)
    grand = (count * mean + rewards.sum()) / max(total, 1)
    squares += count * (mean - grand) ** 2 + float(((rewards - grand) ** 2).sum())
    return [total, float(grand), squares]


def shaped_rewards(
    samples: RawSamples, is_kept: Flags, config: TrainConfig, moments: Sequence[float]
) -> tuple[Array, Array, float]:
    """Return shaped rewards, shaped greedy rewards, and the largest sum of their terms' sizes.

    Shaping is the overlong penalty, running scale and clip. Greedy baselines get the same scale and
    clip as rewards, but do not count in the running moments.
    """
    rewards, size = paid_rewards(samples, config)
    both = np.stack([rewards, samples.greedy_rewards])
    if config.reward_running_norm:
        total, mean, squares = merged_moments(moments, rewards[is_kept])
        is_constant = total < 2 or squares <= total * (1e-14 * mean) ** 2
        scale = 1.0 if is_constant else math.sqrt(squares / (total - 1))
        shift = mean if config.reward_running_norm_minus_mean else 0.0
        both = (both - shift) / scale
        size = (size + abs(shift)) / scale
    if config.reward_clip > 0:
        both = np.clip(both, -config.reward_clip, config.reward_clip)
    return both[0], both[1], size


def _longest_turns(samples: RawSamples) -> Integers:
    """Return the length of the longest run of sampled tokens in each row."""
    longest = []
    for where in rows_of(samples.prompt_lengths + samples.response_lengths):
        edges = np.flatnonzero(~np.r_[False, samples.is_sampled[where], False])
        longest.append(int((np.diff(edges) - 1).max(initial=0)))
    return np.array(longest, dtype=np.int64)


def sampled_lengths(samples: RawSamples) -> Integers:
    """Return the number of sampled tokens of each response: [rows]."""
    lengths = samples.prompt_lengths + samples.response_lengths
    counts = [int(samples.is_sampled[where].sum()) for where in rows_of(lengths)]
    return np.array(counts, dtype=np.int64)
