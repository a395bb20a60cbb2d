"""Proofs about scores: they are of the last token, and the written model gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from lightrft.config import ConfigError
from lightrft.models import RewardModel
from lightrft.models.layout import pad_rows
from lightrft.models.loading import ModelLoadError
from lightrft.models.score_heads import score_weights
from lightrft.stages.reward.comparisons import Judgement
from lightrft.strategy.backend import inner_module

if TYPE_CHECKING:
    from lightrft.strategy.distributed.context import DistributedContext

# Difference of one score in two arithmetics, relative to scores of 1 and more.
ROUNDING, BF16_ROUNDING = 1e-3, 5e-2
# Rows among which the shortest is scored.
NUM_TRIED = 64


@torch.no_grad()
def prove_published(
    model: nn.Module,
    folder: Path,
    judgements: Sequence[Judgement],
    context: DistributedContext,
) -> None:
    """Score a row by the trained model and by the written one; collective.

    The first rank reads the folder as `reward_pretrain` does, and where transformers has the class
    of the model, scores the row by its own forward pass, too. Rows with images are not tried.

    Args:
        model: As it was trained, in evaluation mode.
        folder: Folder of the written model.
        judgements: Training data.
        context: Process groups of the run.

    Raises:
        ModelLoadError: A score differs by more than roundings.
    """
    rows = [row for each in judgements[:NUM_TRIED] for row in each.rows if not row.shown]
    if not rows:
        return
    token_ids = torch.from_numpy(min(rows, key=lambda row: len(row.token_ids)).token_ids).long()
    trained = float(_score(model, token_ids.to(context.device)))
    # By these the first rank says how far both readers are from it.
    differences = torch.zeros(2, dtype=torch.float64, device=context.device)
    in_bf16 = context.computes_in_bf16
    if context.is_rank_0():
        dtype = "bfloat16" if in_bf16 else "float32"
        found = [value - trained for value in _published_scores(folder, token_ids, dtype)]
        differences[: len(found)] = torch.tensor(found, dtype=torch.float64)
    differences = context.all_reduce(differences, "sum")
    floor = BF16_ROUNDING if in_bf16 else ROUNDING
    for reader, difference in zip(("lightrft", "transformers"), differences.tolist(), strict=True):
        # Written so that NaN fails.
        if not abs(difference) <= floor * max(1.0, abs(trained)):
            raise ModelLoadError(
                f"the reward model in {folder} does not score as the one that was trained: a row "
                f"of {len(token_ids)} tokens had {trained:.6g}, read by {reader} it has "
                f"{trained + difference:.6g}; do not use it, its checkpoints are whole"
            )


def _score(model: nn.Module, token_ids: Tensor) -> Tensor:
    """[1] of a row of token ids."""
    ids = token_ids[None]
    found: Tensor = model(ids, torch.ones_like(ids, dtype=torch.bool))
    return found


def _published_scores(folder: Path, token_ids: Tensor, dtype: str) -> list[float]:
    """Return the score of a row by the written model, by our forward pass and by transformers'."""
    written = RewardModel.from_pretrained(str(folder), dtype=dtype).eval()
    found = [float(_score(written, token_ids))]
    if not written.is_beside:
        logits: Tensor = written.model(token_ids[None]).logits[0].float()
        weights = logits.new_tensor(list(score_weights(written.config).values()))
        found.append(float((logits * weights).sum()))
    return found


def prove_pooling(
    model: nn.Module, judgements: Sequence[Judgement], context: DistributedContext
) -> float:
    """Prove that the score of a row depends on its last token and on no padding; collective.

    Args:
        model: Prepared.
        judgements: Training data.
        context: Process groups of the run.

    Returns:
        By how much a score at least changes with the last token.

    Raises:
        ConfigError: It does not.
    """
    texts = [row.token_ids.tolist() for each in judgements[:8] for row in each.rows]
    # Without its last token the shortest row is padded, also where all are of one length.
    texts = [min(texts, key=len)[:-1], max(texts, key=len)]
    token_ids, attention_mask = pad_rows(texts, context.device)
    config = cast("RewardModel", inner_module(model)).config
    size = config.get_text_config().vocab_size
    is_last = attention_mask & (attention_mask.cumsum(1) == attention_mask.sum(1, keepdim=True))
    padded = torch.where(attention_mask, token_ids, 1)
    changed = torch.where(is_last, (token_ids + 1) % size, token_ids)
    model.eval()
    with torch.no_grad():
        found = [model(ids, attention_mask) for ids in (token_ids, padded, changed)]
    by_padding = float((found[0] - found[1]).abs().max())
    by_token = float((found[0] - found[2]).abs().min())
    if by_padding > 1e-3 * by_token or by_token == 0:
        raise ConfigError(
            "pretrain: the score of a row must come from its last token and not from padding: "
            f"another last token changes it by {by_token:.3g}, other padding by {by_padding:.3g}; "
            "give a causal model"
        )
    return by_token
