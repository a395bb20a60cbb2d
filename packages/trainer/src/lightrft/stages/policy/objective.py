"""Objective of a policy update, over all tokens of a micro batch or some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.aggregation import loss_weights, weighted_share
from lightrft.algorithms.interface import PolicyLossFunction, PolicyLossTraits, TokenLoss
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.masking import mask_out
from lightrft.config import LearningOptions
from lightrft.models import Actor
from lightrft.records.batch import ExperienceBatch

if TYPE_CHECKING:
    from lightrft.algorithms.correction_terms import CorrectionTerm


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Inputs of the token loss beside the logprobs: [batch, seq], or [1, tokens] of some.

    Args:
        mask: bool, True on the tokens that count.
        shares: float64, weight of a token in the aggregation, before the division by Z.
        advantages: Advantages of the tokens.
        old_logprobs: Logprobs before the update; None in the first pass over the tokens.
        ref_logprobs: Logprobs of the reference model, or None.
        factors: Further factors of the policy loss (corrections, kept tokens), or None.
    """

    mask: Tensor
    shares: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    factors: Tensor | None

    @classmethod
    def of(
        cls,
        micro: ExperienceBatch,
        *,
        mode: str,
        factors: Tensor | None,
        row_weights: Tensor | None = None,
    ) -> LossTokens:
        """Return the tokens of a micro batch, aggregated in a mode.

        Args:
            micro: Rows of the micro batch.
            mode: Loss aggregation.
            factors: See `LossTokens`.
            row_weights: [batch] importance weights, which multiply no denominator; None is 1.
        """
        mask = micro.rollouts.response_mask
        shares = loss_weights(mask, mode, dtype=torch.float64, row_shares=micro.rollouts.row_shares)
        if row_weights is not None:
            shares = shares * row_weights.unsqueeze(-1)
        return cls(
            mask=mask,
            shares=shares,
            advantages=micro.advantages,
            old_logprobs=micro.outputs.old_logprobs,
            ref_logprobs=micro.outputs.ref_logprobs,
            factors=factors,
        )

    def at(self, rows: Tensor, columns: Tensor) -> LossTokens:
        """Return some tokens, as one row: [1, tokens]."""
        every = {item.name: getattr(self, item.name) for item in fields(self)}
        chosen = {k: None if v is None else v[rows, columns][None] for k, v in every.items()}
        return replace(self, **chosen)  # type: ignore[arg-type]

    def weighted(self, factors: Tensor) -> LossTokens:
        """Return the tokens with further factors of the policy loss, like `mask`."""
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    def old_logprobs_or(self, logprobs: Tensor) -> Tensor:
        """Return the old logprobs, which in the first pass are those of the policy itself."""
        return logprobs.detach() if self.old_logprobs is None else self.old_logprobs


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """policy + kl_coef KL - entropy_coef H, each aggregated with the same Z.

    Args:
        config: Options with the KL's estimator and the entropy weight; a weight of 0 is off.
        token_loss: Loss function with one value per token.
        normalizer: Z of the optimizer batch over all ranks.
        kl_coef: Weight of the KL to the reference model; 0 is off.
    """

    config: LearningOptions
    token_loss: PolicyLossFunction
    normalizer: Tensor
    kl_coef: float

    def terms(
        self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], TokenLoss]:
        """Return the value of the objective over some tokens.

        Args:
            tokens: Tokens with their inputs.
            logprobs, entropy: Values in the shape of `tokens.mask`.

        Returns:
            Share [] of the objective of the optimizer batch; shares [] of the active terms
            "policy", "kl" and "entropy" before their coefficients; and the policy loss before
            further factors.
        """
        mask, old_logprobs = tokens.mask, tokens.old_logprobs_or(logprobs)

        def share_of(token_loss: Tensor) -> Tensor:
            return weighted_share(mask_out(token_loss, mask), tokens.shares, self.normalizer)

        token_loss = self.token_loss(logprobs, old_logprobs, tokens.advantages, mask)
        weighted = token_loss if tokens.factors is None else token_loss.weighted(tokens.factors)
        share = share_of(weighted.loss)
        parts = {"policy": share}
        if self.kl_coef > 0 and tokens.ref_logprobs is not None:
            kl = estimate_kl(
                logprobs,
                tokens.ref_logprobs,
                mask,
                estimator=self.config.kl_estimator_name,
                old_logprobs=old_logprobs,
            )
            parts["kl"] = share_of(kl)
            share = share + self.kl_coef * parts["kl"]
        if self.config.entropy_coef > 0 and entropy is not None:
            parts["entropy"] = share_of(entropy)
            share = share - self.config.entropy_coef * parts["entropy"]
        return share, parts, token_loss


def why_loss_outside(
    config: LearningOptions,
    traits: PolicyLossTraits,
    actor: nn.Module,
    corrections: Sequence[CorrectionTerm] = (),
) -> str | None:
    """Return why the loss is not computed inside the output projection; None if it is.

    Inside, the loss is computed for chunks of tokens. This takes three matrix products with the
    vocabulary instead of four and gives the same numbers.

    Args:
        config: Options of the run, with `fused_linear_logprob` set.
        traits: Traits of the policy loss.
        actor: Policy, unwrapped.
        corrections: Corrections of the loss.
    """
    name = f"policy_loss {config.policy_loss_name}"
    if not config.fused_linear_logprob:
        return "fused_linear_logprob is off"
    if not isinstance(actor, Actor):
        return f"the policy is no lightrft.models.Actor: got {type(actor).__name__}"
    if config.truncates and config.truncated_logprobs == "kept":
        return "truncated_logprobs kept reads no other tokens"
    if any(term.follows_policy for term in corrections):
        return "off_policy_correction compares the policy of each forward pass"
    if traits.couples_rows:
        return f"{name} couples the rows of a micro-batch"
    if traits.is_sequence_level:
        return f"{name} couples the tokens of a row"
    if not traits.is_token_wise:
        return f"{name} is not declared is_token_wise"
    return None
