"""Rows of a step on their way from the ranks that sampled them to those that train them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrft.config import (
    BackendOptions,
    LearningOptions,
)
from lightrft.engines.media.media import EncodedPrompt, RowMedia
from lightrft.engines.media.text_encoder import TEXT_ENCODER, Encoder
from lightrft.experience.minibatches import MinibatchPlan, plan_minibatches
from lightrft.models.shared_prefix import MIN_SHARED_TOKENS, worth_sharing
from lightrft.records.batch import RolloutBatch, collate
from lightrft.records.media import exchange_media
from lightrft.records.recorded import SupportError, replayed_support
from lightrft.records.table import (
    SampleTable,
    deliver_rows,
    episode_places,
    row_shares,
    tabulate,
)
from lightrft.rollout.ledger_records import Evidence, deliver_evidence
from lightrft.rollout.sampler import training_params
from lightrft.rollout.single_turn import turn_source
from lightrft.rollout.source import Samples
from lightrft.strategy.distributed.context import DistributedContext

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine
    from lightrft.strategy.split.bridge import Bridge


@dataclass(frozen=True, slots=True)
class Delivery:
    """Route of rows to the ranks that train them.

    Args:
        training: Ranks that train.
        encoder: Encoder of media.
        generating: Bridge to the ranks that have the samples and call `deliver`; None if the
            training ranks have them.
    """

    training: DistributedContext
    encoder: Encoder = TEXT_ENCODER
    generating: Bridge | None = None


def deliver(
    samples: Samples,
    config: BackendOptions,
    step: int,
    ranks: DistributedContext | Bridge,
    encoder: Encoder,
    *,
    num_training: int,
) -> tuple[MinibatchPlan, SampleTable, tuple[EncodedPrompt | None, ...], Evidence | None]:
    """Send rows to the ranks that train them; collective over ranks that sample or train.

    Args:
        samples: Samples of the step; their holders are numbered as in `ranks`.
        config: Options of the run.
        step: As for `make_experience`.
        ranks: Exchange of bytes between these ranks; the first ones train.
        encoder: Encoder of prompts with media.
        num_training: Number of ranks that train.

    Returns:
        Plan of the step; and of this rank's rows their tokens, media and evidence.
    """
    table, num_ranks = samples.table, num_training // config.sp_size
    shares = config.shared_prefix != "off"
    plan = plan_minibatches(
        table.lengths,
        train_batch_size=config.train_batch_size,
        world_size=num_ranks,
        seed=config.seed,
        step=step,
        episodes=episode_places(table),
        groups=table.group_ids if shares else None,
    )
    if shares:
        # Samples may have got other experts for their prompt, and then share nothing.
        sizes = np.where(table["num_route_bytes"], 0, table.prompt_lengths)
        plan = with_shares(plan, table.lengths, table["prompt_hashes"], sizes)
    wanted = [plan.row_index(each) for each in range(num_ranks) for _ in range(config.sp_size)]
    wanted += [np.empty(0, np.int64)] * (ranks.world_size - len(wanted))
    rows = deliver_rows(table, tabulate(samples.scored), wanted, ranks)
    prompts = exchange_media(table, samples.scored, wanted, ranks, encoder)
    evidence = samples.evidence
    if evidence is not None:
        ids = [table.sample_ids[each].tolist() for each in wanted]
        evidence = deliver_evidence(evidence, ids, ranks)
    return plan, rows, prompts, evidence


def batch_of(
    samples: Samples,
    rows: SampleTable,
    media: RowMedia,
    config: LearningOptions,
    plan: MinibatchPlan,
    context: DistributedContext,
    engine: RolloutEngine | None,
) -> RolloutBatch:
    """Return the tensors of the rows that this rank trains."""
    params, shares = training_params(config), row_shares(samples.table)
    support = replayed_support(params, None if engine is None else engine.name)
    is_over_kept = config.truncated_logprobs == "kept"
    first_temperature = turn_source(config.use_fire).first_temperature(config)
    batch = collate(
        rows,
        temperature=params.temperature,
        device=context.device,
        num_uncompared_tokens=int(first_temperature not in (None, params.temperature)),
        version=version_at_start(samples, engine),
        support=None if support is None else replace(support, renormalises=is_over_kept),
        media=media,
        masks_truncated=config.mask_truncated,
    )
    if shares is None or config.agent_denominator == "branch":
        return batch
    shares_here = torch.from_numpy(shares[plan.row_index(context.data_rank)])
    return replace(batch, row_shares=shares_here.to(context.device))


def version_at_start(samples: Samples, engine: RolloutEngine | None) -> int:
    """Return the version of the weights at the start of the step; else that of the last token."""
    if engine is not None:
        return engine.weights_version
    return int(samples.table.weights_versions.max(initial=-1))


def engine_logprobs(batch: RolloutBatch) -> Tensor:
    """Return the engine's logprobs of the tokens to train on, as those before the update."""
    if batch.support is not None and not batch.support.suffices:
        raise SupportError(
            "use_rollout_logprobs with truncated sampling needs an engine that records the tokens "
            "it kept at every place: leave it out, or use engine_type hf"
        )
    return torch.where(batch.response_mask, batch.rollout_logprobs, 0.0)


def with_shares(
    plan: MinibatchPlan,
    lengths: NDArray[np.int64],
    prompts: NDArray[np.generic],
    prompt_lengths: NDArray[np.int64],
) -> MinibatchPlan:
    """Return the plan with the tokens that rows share with the row before them.

    Args:
        plan: Rows of each batch and rank.
        lengths: [rows] tokens of each sample.
        prompts: [rows] numbers that are equal for equal prompts.
        prompt_lengths: [rows] tokens of each prompt; 0 shares none.
    """
    shared = np.zeros(len(lengths), np.int64)
    for before, row in chain.from_iterable(map(pairwise, chain.from_iterable(plan.rows))):
        shared[row] = prompt_lengths[row] if prompts[row] == prompts[before] else 0
    sizes = torch.from_numpy(lengths)
    tokens = worth_sharing(torch.from_numpy(shared), sizes, MIN_SHARED_TOKENS)
    return replace(plan, shared=tuple(tokens.tolist()))
