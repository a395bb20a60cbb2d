"""Padded tensors from a sample table, and selections of their rows."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from lightrft.engines.media.prompts import NO_MEDIA, RowMedia
from lightrft.models.support import SamplingSupport
from lightrft.records.exchange import SampleTable
from lightrft.records.types import ExperienceBatch, PolicyOutputs, RolloutBatch


def collate(
    table: SampleTable,
    *,
    pad_token_id: int,
    temperature: float,
    device: torch.device,
    num_uncompared_tokens: int = 0,
    version: int | None = None,
    support: SamplingSupport | None = None,
    media: RowMedia = NO_MEDIA,
) -> RolloutBatch:
    """The rows of a table as right-padded tensors.

    A row that is excluded from the loss has an empty response mask. The response mask covers
    exactly the sampled tokens: observations are context only, and no end-of-sequence token is
    added to a truncated response.

    Args:
        table: The rows.
        pad_token_id: Fills rows to equal length.
        temperature: At which all rows were sampled.
        device: Where the tensors go.
        num_uncompared_tokens: First response tokens that were drawn at another temperature.
        version: Of the trainer's weights: tokens of other versions, where the table knows them,
            cannot be compared with them.
        support: What the sampling excluded; None if nothing, or if it cannot be replayed.
        media: Images and videos of the rows.
    """
    prompt_lengths = torch.from_numpy(table.prompt_lengths)[:, None]  # [batch, 1]
    lengths = torch.from_numpy(table.lengths)[:, None]
    width = int(lengths.max()) if len(table) else 0
    positions = torch.arange(width)[None, :]  # [1, seq]
    attention_mask = positions < lengths
    is_response = attention_mask & (positions >= prompt_lengths)
    is_sampled = torch.zeros_like(is_response)
    is_sampled[is_response] = torch.from_numpy(table.is_sampled)
    token_ids = torch.full((len(table), width), pad_token_id, dtype=torch.int64)
    token_ids[attention_mask] = torch.from_numpy(table.token_ids).long()
    logprobs = torch.zeros((len(table), width), dtype=torch.float32)
    logprobs[is_response] = torch.from_numpy(table.rollout_logprobs)
    is_kept = torch.from_numpy(~table.is_masked)[:, None]
    is_compared = is_kept & torch.from_numpy(table.is_untruncated == (support is None))[:, None]
    is_compared = is_compared & is_sampled & (positions >= prompt_lengths + num_uncompared_tokens)
    if table.token_versions is not None:
        is_current = torch.zeros_like(is_response)
        is_current[is_response] = torch.from_numpy(table.token_versions == version)
        is_compared = is_compared & is_current
    return RolloutBatch(
        token_ids=token_ids.to(device),
        attention_mask=attention_mask.to(device),
        response_mask=(is_sampled & is_kept).to(device),
        rollout_logprobs=torch.where(is_kept, logprobs, 0.0).to(device),
        rewards=torch.from_numpy(table.rewards.astype(np.float32)).to(device),
        group_ids=torch.from_numpy(table.group_ids).to(device),
        sample_ids=torch.from_numpy(table.sample_ids).to(device),
        media=media,
        temperature=temperature,
        compared_mask=is_compared.to(device),
        support=support,
    )


def select_rollouts(batch: RolloutBatch, rows: slice) -> RolloutBatch:
    """Consecutive rows, without the columns that are padding in all of them."""
    attention_mask = batch.attention_mask[rows]
    width = int(attention_mask.sum(dim=1).max()) if attention_mask.numel() else 0
    return replace(
        batch,
        token_ids=batch.token_ids[rows, :width],
        attention_mask=attention_mask[:, :width],
        response_mask=batch.response_mask[rows, :width],
        rollout_logprobs=batch.rollout_logprobs[rows, :width],
        rewards=batch.rewards[rows],
        group_ids=batch.group_ids[rows],
        sample_ids=batch.sample_ids[rows],
        media=batch.media[rows],
        compared_mask=None if batch.compared_mask is None else batch.compared_mask[rows, :width],
    )


def select_experience(batch: ExperienceBatch, rows: slice) -> ExperienceBatch:
    """Consecutive rows, without the columns that are padding in all of them."""
    rollouts = select_rollouts(batch.rollouts, rows)
    width = rollouts.token_ids.shape[1]

    def narrow(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows, :width]

    return ExperienceBatch(
        rollouts=rollouts,
        outputs=PolicyOutputs(
            *(narrow(getattr(batch.outputs, field.name)) for field in fields(PolicyOutputs))
        ),
        advantages=batch.advantages[rows, :width],
        returns=batch.returns[rows, :width],
    )


def join_micro_batches(pieces: Sequence[Tensor], width: int) -> Tensor:
    """Per-token tensors [rows, seq_i] of micro batches as one [batch, width], 0-padded."""
    padded = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
    return torch.cat(padded)


def pad_rows(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [batch, seq] int64, right-padded with 0, and what is no padding [batch, seq]."""
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    token_ids = torch.zeros(mask.shape, dtype=torch.int64)
    token_ids[mask] = torch.tensor([token for text in texts for token in text])
    return token_ids.to(device), mask.to(device)
