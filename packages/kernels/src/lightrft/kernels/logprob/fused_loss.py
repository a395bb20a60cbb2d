"""The public `linear_policy_loss`: checks its arguments and cuts the tokens into chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightrft.kernels.logprob import validation
from lightrft.kernels.logprob.policy_loss import (
    LinearPolicyLoss,
    PolicyLossOptions,
    PolicyLossOutput,
    TokenLossFunction,
    plan_row_chunks,
)
from lightrft.kernels.logprob.selection import Request, select_product_engine
from lightrft.kernels.logprob.types import LogitsTransform

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.kernels.logprob.types import Precision

DEFAULT_CHUNK_COLUMNS = 16384


def linear_policy_loss(  # noqa: PLR0913 - one operation with many independent options
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLossFunction,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    precision: Precision = "fp32",
    chunk_tokens: int = 4096,
    sequence_starts: Tensor | None = None,
    logits_budget_bytes: int = 2**31,
) -> PolicyLossOutput:
    """A policy loss of the targets' logprobs and entropies, computed with its gradients at once.

    It costs three matrix products where `linear_logprob` and its backward pass cost four, because
    the logits of a chunk of tokens are stored until their gradient is known.

    Args:
        hidden: [tokens, hidden].
        weight: [vocab, hidden].
        targets: [tokens] int64 in [0, vocab), or `ignore_index`.
        token_loss: Called once for every chunk of tokens, in order; the losses are added. Its
            normaliser must not depend on the chunk.
        bias, temperature, softcap, ignore_index: As in `linear_logprob`.
        precision: "fp32", or "centred" as in `linear_logprob`.
        chunk_tokens: Most tokens of a chunk.
        sequence_starts: [sequences] int64 ascending from 0. A chunk then holds whole sequences,
            for losses that couple the tokens of one; a sequence longer than `chunk_tokens` is a
            chunk of its own. None: chunks begin anywhere.
        logits_budget_bytes: Logits stored at a time; those that do not fit are computed twice.

    Returns:
        The loss, whose gradient reaches hidden, weight and bias, and the detached values. The
        gradients are computed at once if any of them requires one.

    Raises:
        ValueError: A shape, dtype, target or option is invalid, or `token_loss` returns other
            shapes than its protocol says.
    """
    validation.validate_tensors(hidden, weight, targets, bias)
    validation.validate_options(temperature, softcap, "grad", "auto", precision, True)
    for name, value in (
        ("chunk_tokens", chunk_tokens), ("logits_budget_bytes", logits_budget_bytes + 1)
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} must be positive: got {value}")
    active = (targets != ignore_index).nonzero().squeeze(1)
    validation.validate_targets(targets[active], len(weight), ignore_index)
    request = Request("auto", precision, True, True, softcap is not None, DEFAULT_CHUNK_COLUMNS)
    options = PolicyLossOptions(
        engine=select_product_engine(request, hidden, weight),
        token_loss=token_loss,
        row_chunks=plan_row_chunks(active, len(targets), chunk_tokens, sequence_starts),
        logits_budget_bytes=logits_budget_bytes,
    )
    transform = LogitsTransform(float(temperature), None if softcap is None else float(softcap))
    with torch.autocast(hidden.device.type, enabled=False):
        loss, logprobs, entropy = LinearPolicyLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, transform, options
        )
    return PolicyLossOutput(loss, logprobs, entropy)
