"""Objectives on rows of the data: supervised losses, a teacher's distribution, reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as log_sigmoid, pad
from transformers import AutoTokenizer

from lightrft.tools.audit.batches import items_of
from lightrft.tools.audit.losses import normalizer, token_shares
from lightrft.tools.audit.pairs import Draw, Pair, with_slope_of
from lightrft.tools.audit.record import RecordError
from lightrft.tools.audit.replay import ReplayedStep, score_models
from lightrft.tools.audit.updates import (
    Objective,
    Objectives,
    Terms,
    Update,
    trained_model,
    with_options,
)

# Aggregation of each supervised loss.
SUPERVISED_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "dft": "token-mean",
}


def check_ends(step: ReplayedStep) -> None:
    """Check that each run of trained tokens ends in a special token that can stop generation."""
    config, name = step.config, "ends of trained turns"
    if config.train_on == "all" or config.train_on_regex is not None:
        step.results.skip(name, "the options do not train turns")
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(config.pretrain), local_files_only=True)
    except (OSError, ValueError):
        step.results.skip(name, f"no tokenizer in {Path(str(config.pretrain))}")
        return
    added = tokenizer.added_tokens_decoder.items()
    special = [*tokenizer.all_special_ids, *(i for i, each in added if each.special)]
    mask = step.mask
    is_end = mask & ~pad(mask, (0, 1))[:, 1:]
    step.results.exact(name, is_end & torch.isin(step.rows.ids, torch.tensor(special)), is_end)


def supervised_objectives(step: ReplayedStep, reference: Path | None) -> Objectives:
    """Compare scores and ends of turns; return the objective of the model.

    It is the mean of -log p over the trained tokens; dft weighs each by p, without gradient.
    """
    score_models(step, reference)
    check_ends(step)
    loss = step.config.sft_loss
    mode = SUPERVISED_AGGREGATIONS[loss]

    def denominator(mask: Tensor) -> float:
        return normalizer(mask, mode, 1)

    def terms(update: Update, outputs: Sequence[Pair]) -> Terms:
        share, new = token_shares(update.mask, mode) / denominator(update.mask), outputs[0].exact
        losses = -new.detach().exp() * new if loss == "dft" else -new
        return {"policy": (1.0, share * losses)}

    return lambda _: {"actor": Objective(trained_model(step), "logprobs", denominator, terms)}


def divergence_objectives(step: ReplayedStep, _: Path | None) -> Objectives:
    """Return the objective of the student: the mean divergence over the trained tokens."""

    def objectives(draw: Draw) -> dict[str, Objective]:
        def terms(update: Update, outputs: Sequence[Pair]) -> Terms:
            share = update.mask.double() / max(float(update.mask.sum()), 1.0)
            divergence, logprobs = (each.exact for each in outputs)
            # Logprobs of the vocabulary round even if student and teacher agree.
            rounding = draw.signed(torch.full_like(share, step.unit))
            moved = with_slope_of(divergence, divergence + rounding * logprobs)
            return {"policy": (1.0, share * moved)}

        return {"actor": Objective(trained_model(step), "", lambda mask: float(mask.sum()), terms)}

    return objectives


# --- reward models: pairs, rankings, labels, scores or labelled steps

RANK, MARGIN, TARGET = "rank", "margin", "target"


def bradley_terry(d: Tensor, is_tie: Tensor, tie_coef: float = 0.01) -> Tensor:
    """Follow Ouyang et al. 2022, arXiv:2203.02155, eq. 1; ties draw scores together."""
    return torch.where(is_tie, tie_coef * d.abs(), -log_sigmoid(d))


def hps(d: Tensor, is_tie: Tensor, tie_coef: float = 0.01, scale: float = 1 / 0.07) -> Tensor:
    """Follow Wu et al. 2023, arXiv:2306.09341: cross-entropy of two scores at a temperature."""
    return torch.where(is_tie, tie_coef * d.abs(), -log_sigmoid(scale * d))


def rao_kupper(d: Tensor, is_tie: Tensor, tie_width: float = 0.5) -> Tensor:
    """Follow Rao and Kupper 1967 with theta = e^w: ties have the remaining probability."""
    better, worse = log_sigmoid(d - tie_width), log_sigmoid(-d - tie_width)
    return torch.where(is_tie, -better - worse - math.log(math.expm1(2 * tie_width)), -better)


def mse(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the squared distance from the target."""
    return (scores - targets) ** 2


def bce(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a probability s(score)."""
    return -targets * log_sigmoid(scores) - (1 - targets) * log_sigmoid(-scores)


# Losses of differences and ties, or of scores and targets; options are further arguments.
REWARD_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "bradley_terry": bradley_terry,
    "hps": hps,
    "rao_kupper": rao_kupper,
    "mse": mse,
    "bce": bce,
    # Names in other libraries.
    "sigmoid": bradley_terry,
    "logexp": bradley_terry,
}


def score_places(step: ReplayedStep) -> Tensor:
    """Return the last token of each answer or labelled step: [rows, seq] bool."""
    facts, rows = step.record.samples.facts, step.rows
    sizes = {name: len(facts[name]) for name in (RANK, TARGET) if name in facts}
    if sizes == {TARGET: int(rows.lengths.sum())}:
        return rows.mask
    if list(sizes.values()) != [len(rows.lengths)]:
        raise RecordError(f"{step.record.folder} does not say how its answers were judged")
    return torch.arange(rows.ids.shape[1]) == rows.lengths[:, None] - 1


def reward_objectives(step: ReplayedStep, _: Path | None) -> Objectives:
    """Return the objective of the reward model."""
    config, is_compared = step.config, RANK in step.record.samples.facts
    name = config.reward_loss or ("bradley_terry" if is_compared else "bce")
    ended = "" if name in REWARD_LOSSES else f"reward loss {name} is the caller's own"

    def denominator(mask: Tensor) -> float:
        return float(config.train_batch_size if is_compared else mask.sum())

    def terms(update: Update, outputs: Sequence[Pair]) -> Terms:
        loss = with_options(REWARD_LOSSES[name], config.reward_loss_args)
        losses = (_compared if is_compared else _labelled)(step, loss)
        values = losses(outputs[0].exact[update.mask])
        return {"policy": (1.0, values / denominator(update.mask))}

    return lambda _: {"actor": Objective(trained_model(step), "scores", denominator, terms, ended)}


def _labelled(step: ReplayedStep, loss: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the losses of scores from their targets."""
    flat = step.record.samples.facts[TARGET]
    targets = torch.from_numpy(flat).double()
    if len(flat) != len(step.mask):
        targets = step.rows.padded(flat).double()[step.mask]
    return lambda scores: loss(scores, targets)


def _compared(step: ReplayedStep, loss: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the losses of all answer pairs; the pairs of one prompt have a total weight of 1."""
    items, facts = np.array(items_of(step)), step.record.samples.facts
    ranks = torch.from_numpy(facts[RANK])
    margins = torch.from_numpy(facts.get(MARGIN, np.zeros(len(ranks)))).double()
    first, second, weights = list[int](), list[int](), list[float]()
    for item in np.unique(items):
        pairs = list(combinations(np.flatnonzero(items == item).tolist(), 2))
        # The better answer comes first.
        pairs = [(i, j) if ranks[i] <= ranks[j] else (j, i) for i, j in pairs]
        first += [i for i, _ in pairs]
        second += [j for _, j in pairs]
        weights += [1 / len(pairs)] * len(pairs)
    is_tie, shares = ranks[first] == ranks[second], torch.tensor(weights, dtype=torch.float64)

    def losses(scores: Tensor) -> Tensor:
        one, other = scores[first], scores[second]
        centering = step.config.centering_coef * (one + other) ** 2
        return shares * (loss(one - other - margins[first], is_tie) + centering)

    return losses
