"""Padded tensors of the rows that one rank trains on, and selections of their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightrft.engines.media.media import NO_MEDIA, RowMedia
from lightrft.engines.types import ROUTES
from lightrft.records.columns import COLUMNS
from lightrft.records.recorded import recorded_facts
from lightrft.records.table import SampleTable

if TYPE_CHECKING:
    from lightrft.models.support import SamplingSupport


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Padded tensors of the rows one rank trains on.

    All per-token tensors share [batch, seq]: entry t of a row belongs to `token_ids[:, t]` given
    the tokens before t. Rows are right-padded; values outside `response_mask` are 0.

    Args:
        token_ids: [batch, seq] int64, prompt then response, padded with 0.
        attention_mask: [batch, seq] bool, True on prompt and response tokens.
        response_mask: [batch, seq] bool, True on tokens the policy sampled; observations between
            them are context.
        rollout_logprobs: [batch, seq] float32, from the engine.
        rewards: [batch] float32.
        group_ids: [batch] int64.
        sample_ids: [batch] int64.
        temperature: Temperature all rows were sampled at.
        compared_mask: [batch, seq] bool, sampled tokens whose `rollout_logprobs` follow the
            distribution the trainer scores with, or with `support` the truncated one; None if there
            are no such tokens.
        support: Truncation of the sampling, with the ids that the engine recorded for the tokens;
            facts hold their places. None replays nothing.
        media: Images and videos of the rows, by reference.
        facts: Further columns of tokens, [batch, seq], by name; filled outside responses.
        prompt_places: [batch] int64, place of each row's prompt in the data; None is unknown.
        draw_weights: [batch] float64 importance weights of the draws of their prompts; None is 1.
        row_shares: [batch] float64 share of each row in the tokens of its episode, if branches of
            an episode are one sequence; None if each row is one.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    temperature: float
    compared_mask: Tensor | None = None
    support: "SamplingSupport | None" = None
    media: RowMedia = NO_MEDIA
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    row_shares: Tensor | None = None
    prompt_places: Tensor | None = None
    draw_weights: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the rows by name, further columns included."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {**self.facts}
        return {name: each for name, each in values.items() if isinstance(each, Tensor)}


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """Outputs of the models for a `RolloutBatch` before the update; None means "no such model".

    Args:
        old_logprobs: [batch, seq] float32 under the policy at the start of the step. None if the
            update computes them: the step has one optimizer batch and trains once on each row.
        ref_logprobs: [batch, seq] float32 under the reference model.
        values: [batch, seq] float32 from the critic: value before token t is sampled.
        entropy: [batch, seq] float32 of the policy's next-token distribution at token t.
        log_kept_mass: [batch, seq] float32, see `lightrft.models.types.ActorOutput`; it comes with
            the old logprobs of rows that have a `support`.
        teacher_logprobs: [batch, seq] float32 under the teacher.
    """

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    entropy: Tensor | None
    log_kept_mass: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    @property
    def sampling_logprobs(self) -> Tensor | None:
        """Old logprobs under the distribution the engine sampled from, truncation included."""
        if self.old_logprobs is None or self.log_kept_mass is None:
            return self.old_logprobs
        return self.old_logprobs - self.log_kept_mass


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """Inputs of a policy and value update.

    Args:
        rollouts: Padded rows.
        outputs: Model outputs before the update.
        advantages: [batch, seq] float32, 0 outside `response_mask`.
        returns: [batch, seq] float32, 0 outside `response_mask`.
    """

    rollouts: RolloutBatch
    outputs: PolicyOutputs
    advantages: Tensor
    returns: Tensor


def collate(
    table: SampleTable,
    *,
    temperature: float,
    device: torch.device,
    num_uncompared_tokens: int = 0,
    version: int | None = None,
    support: "SamplingSupport | None" = None,
    media: RowMedia = NO_MEDIA,
    masks_truncated: bool = False,
) -> RolloutBatch:
    """Build right-padded tensors of the rows of a table.

    A row that is excluded from the loss has an empty response mask. The mask covers exactly the
    sampled tokens: observations are context, and truncated responses get no extra token.

    Args:
        table: Rows with their tokens.
        temperature: Temperature at which all rows were sampled.
        device: Device of the tensors.
        num_uncompared_tokens: First response tokens that were drawn at another temperature.
        version: Version of the trainer's weights; tokens of other versions are not compared. None
            compares all.
        support: Truncation of the sampling; None if there was none or it cannot be replayed.
        media: Images and videos of the rows.
        masks_truncated: Exclude also rows that their token budget ended.
    """
    lengths = torch.from_numpy(table.lengths)[:, None]  # [batch, 1]
    positions = torch.arange(int(lengths.max()) if len(table) else 0)[None, :]  # [1, seq]
    attention_mask = positions < lengths
    padded = _padded_columns(table, attention_mask)
    is_sampled = padded.pop("is_sampled")
    is_kept = torch.from_numpy(~(table.is_masked | table.is_truncated & masks_truncated))[:, None]
    is_like = torch.from_numpy(table.is_untruncated == (support is None))[:, None]
    is_first = positions < torch.from_numpy(table.prompt_lengths + num_uncompared_tokens)[:, None]
    is_compared = is_kept & is_like & is_sampled & ~is_first
    versions = padded.pop("token_versions")
    if version is not None:
        is_compared = is_compared & (versions == version)
    token_ids = padded.pop("token_ids").to(device)
    padded = {name: _filled(name, values, is_kept, device) for name, values in padded.items()}
    batch = RolloutBatch(
        token_ids=token_ids,
        attention_mask=attention_mask.to(device),
        response_mask=(is_sampled & is_kept).to(device),
        rollout_logprobs=padded.pop("rollout_logprobs"),
        rewards=torch.from_numpy(table.rewards.astype(np.float32)).to(device),
        group_ids=torch.from_numpy(table.group_ids).to(device),
        sample_ids=torch.from_numpy(table.sample_ids).to(device),
        media=media,
        temperature=temperature,
        compared_mask=is_compared.to(device),
        support=support,
        facts=padded,
        prompt_places=_row_fact(table, "prompt_places", device),
        draw_weights=_row_fact(table, "draw_weights", device),
    )
    facts, support = recorded_facts(table, batch.attention_mask, batch.response_mask, support)
    return replace(batch, facts={**batch.facts, **facts}, support=support)


def without_routes(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch whose models choose experts themselves."""
    return replace(batch, facts={n: each for n, each in batch.facts.items() if n != ROUTES})


def _filled(name: str, values: Tensor, is_kept: Tensor, device: torch.device) -> Tensor:
    """Return a column of tokens [batch, seq] with its fill in the rows that are left out."""
    return torch.where(is_kept, values, COLUMNS[name].fill).to(values.dtype).to(device)


def _row_fact(table: SampleTable, name: str, device: torch.device) -> Tensor | None:
    """Return a column of rows [batch], or None if the table has none of this name."""
    return torch.from_numpy(table.facts[name]).to(device) if name in table.facts else None


def _padded_columns(table: SampleTable, attention_mask: Tensor) -> dict[str, Tensor]:
    """Return the table's columns of tokens as [batch, seq] tensors; integers become int64.

    A rare column that is empty in all rows is left out.
    """
    padded, known = {}, table.columns
    for column in COLUMNS.values():
        if not column.is_padded or column.name not in known:
            continue
        if not column.is_rare or known[column.sent_where].any():
            values = torch.from_numpy(table.per_token(column))
            dtype = torch.int64 if issubclass(column.dtype, np.integer) else values.dtype
            tensor = torch.full(attention_mask.shape, column.fill, dtype=dtype)
            tensor[attention_mask] = values.to(dtype)
            padded[column.name] = tensor
    return padded


def select_rollouts(batch: RolloutBatch, rows: slice) -> RolloutBatch:
    """Return consecutive rows, without the columns that are padding in all of them."""
    attention_mask = batch.attention_mask[rows]
    width = int(attention_mask.sum(dim=1).max()) if attention_mask.numel() else 0
    return replace(_narrowed(batch, rows, width), media=batch.media[rows])


def take_rollouts(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """Return some rows of texts, in this order."""
    return _narrowed(batch, rows, batch.token_ids.shape[1])


def select_experience(batch: ExperienceBatch, rows: slice) -> ExperienceBatch:
    """Return consecutive rows, without the columns that are padding in all of them."""
    rollouts = select_rollouts(batch.rollouts, rows)
    width = rollouts.token_ids.shape[1]
    outputs = _narrowed(batch.outputs, rows, width)
    return replace(_narrowed(batch, rows, width), rollouts=rollouts, outputs=outputs)


Record = TypeVar("Record", RolloutBatch, PolicyOutputs, ExperienceBatch)


def _narrowed(record: Record, rows: slice | Tensor, width: int) -> Record:
    """Return the record with some rows and columns of all its tensors."""

    def narrow(value: object) -> object:
        if isinstance(value, dict):
            return {name: narrow(each) for name, each in value.items()}
        if isinstance(value, Tensor):
            return value[rows] if value.dim() == 1 else value[rows, :width]
        return value

    values = {item.name: narrow(getattr(record, item.name)) for item in fields(record)}
    return replace(record, **values)  # type: ignore[arg-type]


def join_micro_batches(pieces: Sequence[Tensor], width: int) -> Tensor:
    """Join per-token tensors [rows, seq_i] of micro batches to one [batch, width], 0-padded."""
    padded = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
    return torch.cat(padded)
