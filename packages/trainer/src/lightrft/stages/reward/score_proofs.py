"""Proofs about scores: they depend on the last token, and the written model scores alike."""

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

# Largest difference of one score in two arithmetics, relative to scores of 1 and more.
ROUNDING, BF16_ROUNDING = 1e-3, 5e-2
# Number of rows among which the shortest is scored.
NUM_TRIED = 64


@torch.no_grad()
def prove_published(
    model: nn.Module,
    folder: Path,
    judgements: Sequence[Judgement],
    context: DistributedContext,
) -> None:
    """Check that trained and written model score a row alike; collective.

    The first rank reads the folder as `reward_pretrain` does. If transformers has the model's
    class, its forward pass scores the row, too. Rows with images are not tried.

    Args:
        model: Trained model, in evaluation mode.
        folder: Folder of the written model.
        judgements: Training data.
        context: Process groups of the run.

    Raises:
        ModelLoadError: A score differs by more than rounding.
    """
    rows = [row for each in judgements[:NUM_TRIED] for row in each.rows if not row.shown]
    if not rows:
        return
    token_ids = torch.from_numpy(min(rows, key=lambda row: len(row.token_ids)).token_ids).long()
    trained = float(_score(model, token_ids.to(context.device)))
    # From the first rank: how far the scores of both readers are from the trained one.
    differences = torch.zeros(2, dtype=torch.float64, device=context.device)
    in_bf16 = context.computes_in_bf16
    if context.is_rank_0():
        dtype = "bfloat16" if in_bf16 else "float32"
        distances = [value - trained for value in _published_scores(folder, token_ids, dtype)]
        differences[: len(distances)] = torch.tensor(distances, dtype=torch.float64)
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
    """Return the score [1] of a row of token ids."""
    ids = token_ids[None]
    scores: Tensor = model(ids, torch.ones_like(ids, dtype=torch.bool))
    return scores


def _published_scores(folder: Path, token_ids: Tensor, dtype: str) -> list[float]:
    """Return the written model's score of a row by our and by transformers' forward pass."""
    written = RewardModel.from_pretrained(str(folder), dtype=dtype).eval()
    scores = [float(_score(written, token_ids))]
    if not written.is_beside:
        logits: Tensor = written.model(token_ids[None]).logits[0].float()
        weights = logits.new_tensor(list(score_weights(written.config).values()))
        scores.append(float((logits * weights).sum()))
    return scores


def prove_pooling(
    model: nn.Module, judgements: Sequence[Judgement], context: DistributedContext
) -> float:
    """Prove that the score of a row depends on its last token but not on padding; collective.

    Args:
        model: Prepared model.
        judgements: Training data.
        context: Process groups of the run.

    Returns:
        Least change of a score when the last token changes.

    Raises:
        ConfigError: The score depends on padding, or not on the last token.
    """
    texts = [row.token_ids.tolist() for each in judgements[:8] for row in each.rows]
    # Cut by its last token, the shortest row is padded even if all rows have one length.
    texts = [min(texts, key=len)[:-1], max(texts, key=len)]
    token_ids, attention_mask = pad_rows(texts, context.device)
    config = cast("RewardModel", inner_module(model)).config
    size = config.get_text_config().vocab_size
    is_last = attention_mask & (attention_mask.cumsum(1) == attention_mask.sum(1, keepdim=True))
    padded = torch.where(attention_mask, token_ids, 1)
    changed = torch.where(is_last, (token_ids + 1) % size, token_ids)
    model.eval()
    with torch.no_grad():
        scores = [model(ids, attention_mask) for ids in (token_ids, padded, changed)]
    by_padding = float((scores[0] - scores[1]).abs().max())
    by_token = float((scores[0] - scores[2]).abs().min())
    if by_padding > 1e-3 * by_token or by_token == 0:
        raise ConfigError(
            "pretrain: the score of a row must come from its last token and not from padding: "
            f"another last token changes it by {by_token:.3g}, other padding by {by_padding:.3g}; "
            "give a causal model"
        )
    return by_token
