"""Imitation of the careless teacher: the short supervised phase before reinforcement."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from lightrft.cli.quickstart.addition import demonstrate, draw_additions
from lightrft.models.presets import ASSISTANT, END, USER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the model is taught.

    Args:
        num_steps: Optimizer steps.
        batch_size: Demonstrations per step, drawn afresh for each.
        learning_rate: Peak of AdamW's learning rate.
        num_warmup_steps: Steps of linear increase; then it falls linearly to a tenth of the peak.
        seed: Seed of the demonstrations.
    """

    num_steps: int = 900
    batch_size: int = 32
    learning_rate: float = 2e-3
    num_warmup_steps: int = 20
    seed: int = 0


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: WarmStart,
    on_step: Callable[[int, float], None],
) -> None:
    """Train `model` in place on demonstrations.

    Args:
        model: Causal language model in fp32.
        tokenizer: Its tokenizer.
        settings: How to train.
        on_step: Called with the number of steps done and the loss in nats per token.
    """
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / settings.num_warmup_steps)
            * max(0.1, 1 - step / settings.num_steps)
        ),
    )
    model.train()
    for step in range(1, settings.num_steps + 1):
        token_ids, targets = demonstration_batch(tokenizer, rng, settings.batch_size)
        loss = _response_loss(model, token_ids, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())
    model.eval()


def demonstration_batch(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Token ids and targets, both [batch, seq] int64, of fresh demonstrations.

    Rows are padded on the right; `targets[:, t]` is `token_ids[:, t]` where the response is
    trained on, and `IGNORED` elsewhere.
    """
    additions = draw_additions(rng, held_out=False)
    chosen = [next(additions) for _ in range(batch_size)]
    prompts = tokenizer([f"{USER}{item.question}{ASSISTANT}" for item in chosen])["input_ids"]
    responses = tokenizer([demonstrate(item, rng) + END for item in chosen])["input_ids"]
    seq = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    token_ids = torch.full((batch_size, seq), tokenizer.pad_token_id)
    targets = torch.full((batch_size, seq), IGNORED)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        token_ids[row, :end] = torch.tensor(prompt + response)
        targets[row, len(prompt) : end] = torch.tensor(response)
    return token_ids, targets


def _response_loss(model: PreTrainedModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the response tokens, in nats.

    No attention mask: rows are padded on the right and attention is causal, so no trained
    position sees the padding.
    """
    logits = model(input_ids=token_ids, use_cache=False).logits  # [batch, seq, vocab]
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
    )
