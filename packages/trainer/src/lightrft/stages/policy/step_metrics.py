"""Metrics of the samples of a step, and of the policy on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightrft.algorithms.interface import TokenLoss
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.masking import log_ratio, masked_difference
from lightrft.algorithms.moments import spread
from lightrft.algorithms.value import explained_variance
from lightrft.config import LearningOptions
from lightrft.experience.maker import StepExperience
from lightrft.records.batch import PolicyOutputs, RolloutBatch
from lightrft.records.rollout import ScoredRollout
from lightrft.records.table import RowTable, episodes_of
from lightrft.rewards.types import CountsCosts, RewardFunction
from lightrft.rollout.source import AGENT_COUNTS, Samples
from lightrft.stages.metrics import StepMetrics

# Name, total and number of items of a mean.
Mean = tuple[str, float, float]


def table_metrics(table: RowTable, *, has_rewards: bool = True) -> dict[str, float]:
    """Return metrics of rewards and lengths of all samples.

    They are exact and equal on every rank without communication. Rows that are excluded from the
    loss count in `masked_share` only, and those with an undecided reward in `undecided_share`.

    Args:
        table: Rows of the samples.
        has_rewards: Something scored the samples; without it metrics of rewards are left out.
    """
    kept = table.take(np.flatnonzero(~table.is_masked).astype(np.int64))
    metrics = {
        "num_samples": len(table),
        "masked_share": table.is_masked.mean(),
        "undecided_share": table.is_undecided.mean(),
    }
    if len(kept):
        rewards, lengths = kept.rewards, kept.sampled_lengths
        if has_rewards:
            metrics |= {
                "reward": rewards.mean(),
                "reward_std": rewards.std(),
                "reward_min": rewards.min(),
                "reward_max": rewards.max(),
                **group_metrics(kept),
            }
        metrics |= {
            "response_length": lengths.mean(),
            "response_length_std": lengths.std(),
            "response_length_max": lengths.max(),
            "prompt_length": kept.prompt_lengths.mean(),
            "truncated_share": kept.is_truncated.mean(),
        }
    for name, values in zip(kept.component_names, kept.components.T, strict=True):
        if not np.isnan(values).all():
            metrics[f"reward/{name}"] = np.nanmean(values)
    return {name: float(value) for name, value in metrics.items()}


def experience_metrics(
    step: StepExperience,
    reduced: Mapping[str, float],
    *,
    num_epochs: int,
    has_rewards: bool = True,
    num_sampled_tokens: int,
) -> dict[str, float]:
    """Return the metrics of a step that every rank knows without communication.

    Args:
        step: Experience of the step.
        reduced: Metrics of the step over all ranks, with its durations.
        num_epochs: Passes of the update over the samples.
        has_rewards: See `table_metrics`.
        num_sampled_tokens: Tokens sampled during this step over all ranks.
    """
    metrics = table_metrics(episodes_of(step.table), has_rewards=has_rewards)
    metrics |= selection_metrics(step.samples) | stream_metrics(step.samples)
    if step.samples.is_undecided:
        metrics["undecided_steps"] = 1.0
    num_tokens = float(step.table.lengths.sum())
    metrics["tokens_per_second"] = num_tokens / reduced["step_seconds"]
    for name in ("idle_seconds", "thin_seconds"):
        metrics[f"{name}_share"] = reduced[name] / reduced["step_seconds"]
    if num_sampled_tokens:
        speed = num_sampled_tokens / reduced["rollout_seconds"]
        metrics["rollout_tokens_per_second"] = speed
    return metrics | _stage_speeds(step, reduced, num_epochs)


def _stage_speeds(
    step: StepExperience, metrics: Mapping[str, float], num_epochs: int
) -> dict[str, float]:
    """Return tokens per second of forward passes and update."""
    outputs, num_tokens = step.batch.outputs, float(step.table.lengths.sum())
    speeds = {"train_tokens_per_second": num_epochs * num_tokens / metrics["train_seconds"]}
    known = (outputs.old_logprobs, outputs.ref_logprobs, outputs.teacher_logprobs, outputs.values)
    looked = [each for each in known if each is not None]
    if looked:
        speeds["forward_tokens_per_second"] = len(looked) * num_tokens / metrics["forward_seconds"]
    return speeds


def selection_metrics(samples: Samples) -> dict[str, float]:
    """Return metrics of the groups that dynamic sampling sampled and did not train on."""
    selection = samples.selection
    if selection is None:
        return {}
    num_groups = selection.num_groups
    return {
        "dynamic/num_gen_batches": float(samples.num_rounds),
        "dynamic/num_groups": float(num_groups),
        "dynamic/constant_share": selection.num_constant / num_groups,
        "dynamic/solved_share": selection.num_solved / num_groups,
        "dynamic/surplus_share": selection.num_surplus / num_groups,
        "dynamic/skipped_steps": float(selection.is_empty),
        "dynamic/filler_share": float(selection.is_filler.mean()),
    }


def stream_metrics(samples: Samples) -> dict[str, float]:
    """Return metrics of streaming rollouts: sampled tokens and open groups."""
    report = samples.report
    if report is None:
        return {}
    return {
        "stream/sampled_tokens": float(report.num_sampled_tokens),
        "stream/open_groups": float(report.num_open),
        "stream/open_tokens": float(report.num_open_tokens),
        "stream/waited_groups": float(report.num_waited),
    }


def record_staleness(step: StepExperience, metrics: StepMetrics) -> None:
    """Record by how many updates this rank's tokens are stale."""
    staleness = step.version - step.rows.token_versions[step.rows.is_sampled]
    metrics.add_mean("staleness/token_share", float((staleness > 0).sum()), len(staleness))
    metrics.add_mean("staleness/mean", float(staleness.sum()), len(staleness))
    metrics.add_max("staleness/max", float(staleness.max(initial=0)))


def group_metrics(table: RowTable) -> dict[str, np.floating]:
    """Return the share of prompts whose samples have equal rewards, and the mean deviation.

    The latter is the mean over prompts of the standard deviation of their samples' rewards.
    """
    groups = [table.rewards[table.group_ids == group] for group in np.unique(table.group_ids)]
    return {
        "constant_group_share": np.mean([spread(r.min(), r.max()) <= 0 for r in groups]),
        "group_reward_std": np.mean([rewards.std() for rewards in groups]),
    }


def record_experience(
    step: StepExperience, metrics: StepMetrics, config: LearningOptions, *, has_rewards: bool = True
) -> None:
    """Record metrics of this rank's rows: advantages, values and, if it was run, policy."""
    batch, rollouts = step.batch, step.batch.rollouts
    mask = rollouts.response_mask
    if config.use_rollout_logprobs:
        # Logprobs compared with themselves would look perfect.
        rollouts = replace(rollouts, compared_mask=None)
    if batch.outputs.old_logprobs is not None:
        record_policy(rollouts, batch.outputs, metrics, kl_estimator=config.kl_estimator_name)
    means = {"advantage_mean": batch.advantages, "advantage_abs": batch.advantages.abs()}
    if has_rewards:
        scored = step.rewards.rewards[torch.from_numpy(~step.table.is_masked)]
        # The number is equal on all ranks: each has all rewards.
        metrics.add_max("nonfinite/rewards", float((~scored.isfinite()).sum()))
        num_clipped = float(step.rewards.is_clipped.sum())
        metrics.add_mean("reward_clipped_share", num_clipped, len(step.table))
    if batch.outputs.values is not None:
        means |= {"value_mean": batch.outputs.values, "return_mean": batch.returns}
        values, goals = batch.outputs.values.double(), batch.returns.double()
        metrics.add_pairs("explained_variance", goals, goals - values, mask, explained_variance)
    metrics.add_masked_means(means, mask)
    if config.keeps_rows:
        record_staleness(step, metrics)
    for mean in rollout_means(step.samples):
        metrics.add_mean(*mean)


def record_tallies(reward: RewardFunction, metrics: StepMetrics) -> None:
    """Record the counts of a reward since the last step: tokens, seconds and cost of a judge."""
    tallies = reward.take_tallies() if isinstance(reward, CountsCosts) else {}
    for name, (total, count) in tallies.items():
        if count is None:
            metrics.add_count(name, total)
        else:
            metrics.add_mean(name, total, count)


def rollout_means(samples: Samples) -> list[Mean]:
    """Return means of this rank's samples before training; the names are equal on all ranks."""
    ids = (item.rollout.completion.sampled_token_ids for item in samples.scored)
    means = [
        ("repeated_share", 0.0, 0.0),
        *(("repeated_share", repeated_share(i), 1.0) for i in ids),
    ]
    if samples.tool_names is not None:
        means += conversation_means(samples.scored, samples.tool_names)
    if samples.agent_counts is not None:
        means += [(f"agent/{name}", 0.0, 0.0) for name in AGENT_COUNTS]
    for counts in samples.agent_counts or ():
        means += [(f"agent/{name}", count, 1.0) for name, count in counts.items()]
    return means


def conversation_means(scored: Sequence[ScoredRollout], tool_names: Sequence[str]) -> list[Mean]:
    """Return means of turns, calls and outcomes; of each tool its calls, errors and seconds.

    Args:
        scored: This rank's samples.
        tool_names: Names of the tools, equal on all ranks.
    """
    known = [talk for item in scored if (talk := item.rollout.conversation) is not None]
    calls = [call for talk in known for turn in talk.answers for call in turn]
    made = [call for call in calls if call.outcome in ("ok", "error")]
    outcomes = Counter(call.outcome for call in calls)
    totals = {
        "episode/turns": sum(len(talk.turns) for talk in known),
        "episode/calls": len(made),
        "episode/malformed_calls": outcomes["malformed"],
        "episode/refused_calls": outcomes["refused"],
        "episode/restarts": sum(talk.num_restarts for talk in known),
        "episode/failed_share": sum(item.is_masked for item in scored),
    }
    means: list[Mean] = [(name, total, len(known)) for name, total in totals.items()]
    for name in tool_names:
        tool_calls = [call for call in made if call.name == name]
        errors = sum(call.outcome == "error" for call in tool_calls)
        means += [
            (f"tool/{name}/calls", len(tool_calls), len(known)),
            (f"tool/{name}/error_share", errors, len(tool_calls)),
            (f"tool/{name}/seconds", sum(call.seconds for call in tool_calls), len(tool_calls)),
        ]
    return means


def repeated_share(token_ids: Sequence[int], *, size: int = 4) -> float:
    """Return the share of runs of `size` tokens that occurred before in the same response."""
    count = len(token_ids) - size + 1
    if count < 2:
        return 0.0
    windows = set(zip(*(token_ids[first : first + count] for first in range(size)), strict=True))
    return 1.0 - len(windows) / count


@torch.no_grad()
def record_policy(
    rollouts: RolloutBatch, outputs: PolicyOutputs, metrics: StepMetrics, *, kl_estimator: str
) -> None:
    """Record metrics of the policy at the start of the step: entropy, KL, and parity.

    `record_mismatch` runs over the response tokens whose logprobs follow the same distribution in
    engine and trainer.

    Args:
        rollouts: Rows of the step.
        outputs: Outputs of the models, with the old logprobs.
        metrics: Receives the numbers.
        kl_estimator: Estimator of the KL to the reference model.
    """
    mask, old, sampling = rollouts.response_mask, outputs.old_logprobs, outputs.sampling_logprobs
    teacher = outputs.teacher_logprobs
    for logprobs in (rollouts.rollout_logprobs, old, outputs.ref_logprobs, teacher):
        metrics.add_count("nonfinite/logprobs", num_nonfinite(logprobs, mask))
    sizes = rollouts.facts.get("kept_sizes")
    if sizes is not None:
        metrics.add_masked_mean("kept_ids_per_token", sizes, mask)
        metrics.add_masked_mean("kept_ids_unrecorded_share", sizes == 0, mask)
    if outputs.entropy is not None:
        metrics.add_masked_mean("entropy", outputs.entropy, mask)
    if rollouts.compared_mask is not None and sampling is not None:
        compared = (rollouts.rollout_logprobs, sampling, rollouts.compared_mask)
        record_mismatch(*compared, metrics)
        if rollouts.media.present:
            prompts = rollouts.media.of_rows(len(mask))
            has_media = torch.tensor([prompt is not None for prompt in prompts])
            record_by_media(*compared, has_media.to(mask.device), metrics)
    if outputs.ref_logprobs is not None and old is not None:
        kl = estimate_kl(old, outputs.ref_logprobs, mask, estimator=kl_estimator, old_logprobs=old)
        metrics.add_masked_mean("kl", kl, mask)
        metrics.add_mean("kl_per_response", kl.double().sum(), mask.any(dim=1).sum())
    if teacher is not None and old is not None:
        metrics.add_masked_mean("teacher_kl", masked_difference(old, teacher, mask), mask)


@torch.no_grad()
def record_ratios(
    token_loss: TokenLoss,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    metrics: StepMetrics,
) -> None:
    """Record ratios of new to old policy, clipped shares, and the size of the update."""
    # Bounded, so that one outlier token does not make the mean infinite.
    difference = log_ratio(logprobs, old_logprobs, mask).values
    means = {
        "ratio_mean": token_loss.ratio,
        "clip_fraction_low": token_loss.is_clipped_low,
        "clip_fraction_high": token_loss.is_clipped_high,
        "clamped_share": token_loss.is_clamped,
        # expm1(d) - d = r - 1 - ln r, without the cancellation near 0.
        "approx_kl": difference.expm1() - difference,
    }
    metrics.add_masked_means(means, mask)
    metrics.add_max("ratio_max", token_loss.ratio.where(mask, -torch.inf).amax())


def num_nonfinite(values: Tensor | None, mask: Tensor) -> Tensor:
    """Return how many entries of `values` [batch, seq] are NaN or infinite inside `mask`."""
    if values is None:
        return mask.new_zeros((), dtype=mask.dtype).long()
    return (mask & ~values.detach().isfinite()).sum()


@torch.no_grad()
def record_mismatch(
    rollout_logprobs: Tensor, logprobs: Tensor, compared_mask: Tensor, metrics: StepMetrics
) -> None:
    """Record the difference between engine and trainer on rows of a step.

    Raw: nothing is clipped or left out. With d_t = rollout_t - trainer_t, both logprobs of the
    sampled token t under the same distribution:

        logprob_diff_mean, logprob_diff_max    mean and largest |d_t|
        logprob_diff_exp                       mean exp|d_t|, 1 where both agree
        mismatch_kl_k1, mismatch_kl_k3         mean d_t and mean exp(-d_t) - 1 + d_t: estimates of
                                               the KL divergence of the engine from the trainer
        logprob_pearson                        correlation of the two
        sequence_log_ratio_min, .._max         extremes over responses of sum_t(-d_t)
        sequence_diff_max                      largest mean |d_t| of one response

    Source of the estimators: Schulman, "Approximating KL divergence", 2020.

    Args:
        rollout_logprobs, logprobs: [batch, seq] of the engine and of the trainer.
        compared_mask: [batch, seq] bool, tokens for which both follow the same distribution.
        metrics: Receives the numbers.
    """
    mask = compared_mask
    rollout = torch.where(mask, rollout_logprobs.detach().double(), 0.0)
    trainer = torch.where(mask, logprobs.detach().double(), 0.0)
    difference = rollout - trainer
    size = difference.abs()
    means = {
        "logprob_diff_mean": size,
        "logprob_diff_exp": size.exp(),
        "mismatch_kl_k1": difference,
        # expm1(-d) + d = exp(-d) - 1 + d, without the cancellation near 0.
        "mismatch_kl_k3": (-difference).expm1() + difference,
    }
    metrics.add_masked_means(means, mask)
    metrics.add_max("logprob_diff_max", _largest(size, mask))
    metrics.add_pairs(
        "logprob_pearson", rollout, trainer, mask, lambda moments: moments.correlation
    )
    rows = mask.any(dim=1)
    counts = mask.sum(dim=1).clamp(min=1)
    ratios = -difference.sum(dim=1)
    metrics.add_max("sequence_log_ratio_max", _largest(ratios, rows))
    metrics.add_min("sequence_log_ratio_min", -_largest(-ratios, rows))
    metrics.add_max("sequence_diff_max", _largest(size.sum(dim=1) / counts, rows))


@torch.no_grad()
def record_by_media(
    rollout_logprobs: Tensor,
    logprobs: Tensor,
    compared_mask: Tensor,
    has_media: Tensor,
    metrics: StepMetrics,
) -> None:
    """Record mean and largest difference separately for rows with and without media.

    An encoder that differs in the engine shows in `.../media` alone.

    Args:
        rollout_logprobs, logprobs, compared_mask, metrics: See `record_mismatch`.
        has_media: [batch] bool, rows with images or videos.
    """
    size = torch.where(compared_mask, rollout_logprobs.double() - logprobs.double(), 0.0).abs()
    for name, rows in (("text", ~has_media), ("media", has_media)):
        mask = compared_mask & rows[:, None]
        metrics.add_masked_mean(f"logprob_diff_mean/{name}", size, mask)
        metrics.add_max(f"logprob_diff_max/{name}", _largest(size, mask))


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest marked value, NaN if a marked one is NaN; -inf if none is marked."""
    kept = torch.where(mask, values, -torch.inf).flatten()
    return torch.cat([kept, kept.new_tensor([-torch.inf])]).max()
