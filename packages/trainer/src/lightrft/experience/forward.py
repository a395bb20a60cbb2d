"""What the models say about the rollouts before the update, in micro batches and without graph."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.models.types import ActorOutput, EntropyMode, PolicyModel, ValueModel
from lightrft.records.batch import PolicyOutputs, RolloutBatch, join_micro_batches, select_rollouts


@dataclass(frozen=True, slots=True)
class ForwardModels:
    """The models that score rollouts; None where the algorithm has no such model."""

    actor: PolicyModel
    reference: PolicyModel | None = None
    critic: ValueModel | None = None


def compute_outputs(
    batch: RolloutBatch,
    models: ForwardModels,
    *,
    slices: Sequence[slice],
    scores_actor: bool = True,
) -> PolicyOutputs:
    """Old and reference logprobs, values and entropies of all response tokens.

    One model after the other, so that only one needs its activations and gathered weights.

    Args:
        batch: This rank's rows.
        models: What looks at them.
        slices: Rows of each forward pass, in order; they cover the batch.
        scores_actor: False leaves the old logprobs and entropies to the update.
    """
    seen: ActorOutput | None = None
    with torch.no_grad():
        if scores_actor:
            seen = _score(models.actor, batch, slices=slices, entropy="value")
        ref_logprobs = None
        if models.reference is not None:
            # What was excluded is a matter of the policy that sampled.
            plain = replace(batch, support=None)
            ref_logprobs = _score(models.reference, plain, slices=slices, entropy="none").logprobs
        values = None
        if models.critic is not None:
            values = _evaluate(models.critic, batch, slices=slices)
    if seen is None:
        return PolicyOutputs(None, ref_logprobs, values, None)
    return PolicyOutputs(seen.logprobs, ref_logprobs, values, seen.entropy, seen.log_kept_mass)


@torch.no_grad()
def score_actor(batch: RolloutBatch, actor: PolicyModel, *, slices: Sequence[slice]) -> Tensor:
    """The actor's logprobs of all response tokens, in its present mode: [batch, seq] float32.

    They follow the distribution the rows were sampled from, without what it excludes.

    Args:
        batch: This rank's rows.
        actor: Every rank calls it equally often.
        slices: Rows of each forward pass, in order; they cover the batch.
    """
    return _score(actor, batch, slices=slices, entropy="none").sampling_logprobs


def _score(
    policy: PolicyModel, batch: RolloutBatch, *, slices: Sequence[slice], entropy: EntropyMode
) -> ActorOutput:
    outputs: list[ActorOutput] = []
    for rows in slices:
        micro = select_rollouts(batch, rows)
        outputs.append(
            policy(
                micro.token_ids,
                micro.attention_mask,
                scored_mask=micro.response_mask,
                temperature=scoring_temperature(micro.temperature),
                entropy=entropy,
                media=micro.media,
                support=micro.support,
            )
        )
    width = batch.token_ids.shape[1]

    def joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
        found = [piece for piece in pieces if piece is not None]
        return join_micro_batches(found, width) if found else None

    return ActorOutput(
        join_micro_batches([output.logprobs for output in outputs], width),
        joined([output.entropy for output in outputs]),
        log_kept_mass=joined([output.log_kept_mass for output in outputs]),
    )


def _evaluate(critic: ValueModel, batch: RolloutBatch, *, slices: Sequence[slice]) -> Tensor:
    pieces: list[Tensor] = []
    for rows in slices:
        micro = select_rollouts(batch, rows)
        values = critic(micro.token_ids, micro.attention_mask, media=micro.media)
        pieces.append(torch.where(micro.response_mask, values, 0.0))
    return join_micro_batches(pieces, batch.token_ids.shape[1])


def scoring_temperature(temperature: float) -> float:
    """The temperature at which samples are scored: greedy samples are scored at 1."""
    return temperature if temperature > 0 else 1.0
