"""Objectives on answers of the data: supervised losses and a teacher's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightrft.tools.audit.losses import normalizer, token_shares
from lightrft.tools.audit.pairs import Borders, Differentiated, Pair, with_rounding
from lightrft.tools.audit.replay import ReplayedStep, score_models
from lightrft.tools.audit.updates import LossTerm, ReplayedLoss, Update, trained_model

# Aggregation of each supervised loss.
SUPERVISED_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "dft": "token-mean",
}


class SupervisedReplay(ReplayedLoss):
    """Mean of -log p over the trained tokens; dft weighs each by p, without gradient."""

    scores = "logprobs"

    def denominator(self, mask: Tensor) -> float:
        """Return Z of the loss aggregation."""
        return normalizer(mask, SUPERVISED_AGGREGATIONS[self.step.config.sft_loss], 1)

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the supervised loss."""
        loss, mask = self.step.config.sft_loss, update.mask
        share = token_shares(mask, SUPERVISED_AGGREGATIONS[loss]) / self.denominator(mask)

        def mean(new: Pair, _: Borders) -> Tensor:
            weights = new.exact.detach().exp() if loss == "dft" else torch.ones_like(share)
            return -share * weights * new.exact

        yield LossTerm(
            "policy", 1.0, *with_rounding(mean, scores, (error, -error), self.step.borders)
        )


class DivergenceReplay(ReplayedLoss):
    """Mean divergence over the trained tokens."""

    scores = ""

    def denominator(self, mask: Tensor) -> float:
        """Return the number of trained tokens."""
        return float(mask.sum())

    def terms(
        self, update: Update, scores: Pair, error: Tensor, others: Sequence[Tensor]
    ) -> Iterator[LossTerm]:
        """Yield the mean divergence."""
        share = update.mask / max(self.denominator(update.mask), 1.0)
        exact = Differentiated(scores.exact * share, share)
        yield LossTerm("policy", 1.0, exact, Differentiated(self.step.unit * share, 0 * share))

    def noises(self, slopes: Sequence[Tensor], moved: Tensor) -> list[Tensor]:
        """Return the rounding of many logprobs per token, which round even if they agree."""
        return [self.step.unit * slopes[0]] * len(slopes)


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
    mask = step.rows.mask
    is_end = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    is_special = np.isin(step.rows.ids, special)
    step.results.exact(name, is_end & is_special, is_end)


def supervised_objectives(step: ReplayedStep, reference: Path | None) -> dict[str, ReplayedLoss]:
    """Compare scores and ends of turns; return the objective of the model."""
    score_models(step, reference)
    check_ends(step)
    return {"actor": SupervisedReplay(step, trained_model(step))}


def divergence_objectives(step: ReplayedStep, _: Path | None) -> dict[str, ReplayedLoss]:
    """Return the objective of the student."""
    return {"actor": DivergenceReplay(step, trained_model(step))}
