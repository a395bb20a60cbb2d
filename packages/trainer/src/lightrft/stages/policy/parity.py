"""Parity gate: engine and trainer must compute the same logprobs for the tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.engines.base import RolloutEngine
from lightrft.engines.hf.layers import module_outputs
from lightrft.engines.media.media import EncodedPrompt, RowMedia
from lightrft.records.batch import RolloutBatch
from lightrft.stages.parity_limits import ParityError, ParityLimits, parity_limits
from lightrft.strategy.backend import inner_module
from lightrft.strategy.weight_sync.canary import compute_dtypes
from lightrft.strategy.weight_sync.parameter_source import checkpoint_module

if TYPE_CHECKING:
    from lightrft.strategy.backend import Backend
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.engine.session import EngineSession


@dataclass(frozen=True, slots=True)
class WorstToken:
    """Token on which engine and trainer differ most.

    Args:
        difference: Distance of the two logprobs; infinite if one is not a number.
        sample_id: Id of its sample.
        token_ids: Row up to and including the token.
        text: Description for people.
    """

    difference: float
    sample_id: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Result of the gate over all ranks.

    Args:
        num_tokens: Tokens compared.
        mean: Mean |difference| of their logprobs.
        worst: Token that differs most; None without tokens.
        limits: Allowed differences.
    """

    num_tokens: int
    mean: float
    worst: WorstToken | None
    limits: ParityLimits

    @property
    def holds(self) -> bool:
        """Return whether the differences are within the limits; NaN is not."""
        if self.worst is None:
            return True
        return self.mean <= self.limits.mean and self.worst.difference <= self.limits.largest

    def summary(self) -> str:
        """Return the result in one line."""
        if self.worst is None:
            return (
                "parity: no token whose logprobs follow the same distribution in engine and trainer"
            )
        return (
            f"parity: engine and trainer logprobs of {self.num_tokens} tokens differ by "
            f"{self.mean:.2e} in the mean and {self.worst.difference:.2e} at most (limits "
            f"{self.limits.mean:g} and {self.limits.largest:g})"
        )


def compare_logprobs(
    batch: RolloutBatch, logprobs: Tensor, *, limits: ParityLimits, context: DistributedContext
) -> ParityReport:
    """Compare this rank's rows and join the results of all ranks; collective.

    Args:
        batch: This rank's rows.
        logprobs: [batch, seq] of the trainer, under the weights that sampled the rows.
        limits: Allowed differences.
        context: Process groups of the ranks.
    """
    mask = batch.compared_mask
    if mask is None:
        mask = torch.zeros_like(batch.response_mask)
    size = (batch.rollout_logprobs.double() - logprobs.double()).abs()
    size = torch.where(mask, size, 0.0)
    worst = _worst_token(batch, logprobs, size, mask)
    local = (int(mask.sum()), float(size.sum()), worst)
    results: list[tuple[int, float, WorstToken | None]] = context.gather_objects(
        local, context.dp_group
    )
    num_tokens = sum(count for count, _, _ in results)
    total = sum(amount for _, amount, _ in results)
    candidates = [token for _, _, token in results if token is not None]
    return ParityReport(
        num_tokens,
        total / max(num_tokens, 1),
        max(candidates, key=lambda token: token.difference, default=None),
        limits,
    )


def _worst_token(
    batch: RolloutBatch, logprobs: Tensor, size: Tensor, mask: Tensor
) -> WorstToken | None:
    if not bool(mask.any()):
        return None
    ranked = torch.where(mask, size.nan_to_num(nan=torch.inf), -1.0)
    row, position = divmod(int(ranked.argmax()), size.shape[1])
    ids = batch.token_ids[row, : position + 1].tolist()
    engine, trainer = float(batch.rollout_logprobs[row, position]), float(logprobs[row, position])
    distance, sample_id = abs(engine - trainer), int(batch.sample_ids[row])
    is_sampled = batch.response_mask[row].int()
    # Observations end a turn.
    turn = int((is_sampled.diff()[:position] == 1).sum()) - 1
    text = (
        f"sample {sample_id}, turn {turn}, response token {position - int(is_sampled.argmax())} "
        f"(id {ids[-1]}): engine {engine:.6g}, trainer {trainer:.6g}\n"
        f"  its last tokens: {ids[-16:]}"
    )
    distance = distance if math.isfinite(distance) else math.inf
    return WorstToken(distance, sample_id, tuple(ids), text)


def check_parity(
    batch: RolloutBatch,
    logprobs: Tensor,
    actor: nn.Module,
    *,
    backend: Backend,
    session: EngineSession,
    mean_limit: float | None = None,
) -> ParityReport:
    """Raise unless engine and trainer agree on the logprobs of a step; collective.

    Args:
        batch: This rank's rows.
        logprobs: [batch, seq] of the trainer, under the weights that sampled the rows.
        actor: Trainer's model as the strategy wrapped it.
        backend: Backend that prepared the actor.
        session: Engine of these ranks.
        mean_limit: Allowed mean |difference|; None takes that of the dtypes in use.

    Returns:
        Report of the comparison.

    Raises:
        NotImplementedError: There is no engine.
        ParityError: They disagree. All ranks raise, with numbers and the worst token; with the
            embedded engine also the first layer whose outputs differ.
    """
    context, limits = backend.context, limits_of(actor, backend, session, mean_limit)
    report = compare_logprobs(batch, logprobs, limits=limits, context=context)
    worst = report.worst
    if report.holds or worst is None:
        return report
    raise ParityError(
        "engine and trainer compute different logprobs for the same tokens, so the engine does not "
        f"sample from the model that is trained\n  {report.summary()}\n"
        f"  worst token: {worst.text}\n" + _layer(worst, batch, actor, session, limits.hidden)
    )


def limits_of(
    actor: nn.Module, backend: Backend, session: EngineSession, mean_limit: float | None
) -> ParityLimits:
    """Return the limits of the dtypes in use, or with another mean; see `check_parity`."""
    dtype, source = backend.context.compute_dtype, backend.parameter_source(actor)
    limits = parity_limits(compute_dtypes(dtype, session.running, source))
    if mean_limit is None:
        return limits
    return ParityLimits(mean_limit, max(limits.largest, mean_limit), limits.hidden)


def _layer(
    worst: WorstToken, batch: RolloutBatch, actor: nn.Module, session: EngineSession, limit: float
) -> str:
    """Return a line on the first layer that differs, if the engine shows its layers; collective."""
    engine, context = session.running, session.context
    if context.config.sp_size > 1:
        return "  layers: not compared, each rank computes a slice of the sequence"
    local_media = dict(zip(batch.sample_ids.tolist(), batch.media.prompts, strict=False))
    holders = context.gather_objects(local_media.get(worst.sample_id))
    media = next((media for media in holders if media is not None), None)
    session.wake_up()
    if engine.weights_were_dropped:
        return "  layers: not compared, the engine has dropped its weights to sleep"
    layer = first_divergence(
        inner_module(actor),
        actor,
        engine,
        worst.token_ids,
        device=context.device,
        limit=limit,
        media=media,
    )
    # Each rank's engine has a copy of the weights; only one of them may be wrong.
    texts = [text for text in context.gather_objects(layer) if text is not None]
    if not texts:
        what = "the images of this row" if media is not None else "its hidden states"
        return f"  layers: not compared, the {engine.name} engine does not show {what}"
    return "  layers: " + next(
        (text for text in texts if text),
        "all agree when the row is computed again, so it was sampled with other weights or from "
        "a stale cache",
    )


def first_divergence(
    trainer: nn.Module,
    actor: nn.Module,
    engine: RolloutEngine,
    token_ids: Sequence[int],
    *,
    device: torch.device,
    limit: float,
    media: EncodedPrompt | None = None,
) -> str | None:
    """Run one sequence through the models of trainer and engine, and compare all layers.

    Collective where the trainer's model is sharded: every rank must call it.

    Args:
        trainer: Unwrapped actor, whose modules are watched.
        actor: Actor as the strategy wrapped it, which is called.
        engine: Engine of this rank.
        token_ids: Ids of the sequence.
        device: Device of the actor.
        limit: Allowed ||a - b|| / ||b|| of a layer's output.
        media: Prompt that the sequence begins with, if it has images or videos.

    Returns:
        One line about the first layer that differs, "" if none does; None if the engine does not
        show its layers.
    """
    tokens = torch.tensor([list(token_ids)], device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    inputs = {} if media is None else {"media": RowMedia((media,))}
    expected = module_outputs(checkpoint_module(trainer), lambda: actor(tokens, mask, **inputs))
    outputs = engine.layer_outputs(token_ids, media)
    if not outputs:
        return None
    for name in [name for name in outputs if name in expected]:
        distance = _distance(outputs[name], expected[name])
        # Written so that NaN counts as a difference.
        if distance is not None and not distance <= limit:
            return (
                f"outputs differ first in {name} (||engine - trainer|| / ||trainer|| = "
                f"{distance:.2e}, expected at most {limit:g})"
            )
    return ""


def _distance(found: Tensor, expected: Tensor) -> float | None:
    """Return ||found - expected|| / ||expected||; None if the sizes (layouts) differ."""
    if found.numel() != expected.numel():
        return None
    right = expected.double().flatten().cpu()
    left = found.double().flatten().cpu()
    return float((left - right).norm() / right.norm().clamp(min=1e-30))
