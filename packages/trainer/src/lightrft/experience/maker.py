"""Experience of a step: model outputs and advantages of the samples that one rank trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.algorithms.advantages.row_level import (
    clip_rewards,
    estimate_row_advantages,
    normalize_rewards,
)
from lightrft.algorithms.advantages.token_level import (
    broadcast_to_tokens,
    estimate_token_advantages,
    token_rewards,
    turn_discounts,
)
from lightrft.algorithms.interface import (
    AdvantageFunction,
    RowAdvantageInputs,
    TokenAdvantageInputs,
    TokenAdvantages,
    advantage_traits,
)
from lightrft.algorithms.kl import estimate_kl
from lightrft.algorithms.masking import masked_difference
from lightrft.algorithms.moments import Moments, masked_moments, moments_of, whiten
from lightrft.config import (
    ConfigError,
    SampledTeacherOptions,
    ShapingOptions,
    TrainConfig,
)
from lightrft.engines.media.media import RowMedia
from lightrft.engines.types import ROUTES
from lightrft.experience.delivery import (
    Delivery,
    batch_of,
    deliver,
    engine_logprobs,
    version_at_start,
)
from lightrft.experience.minibatches import MinibatchPlan
from lightrft.models.layout import LayoutPolicy
from lightrft.models.sequence_model import layout_policy
from lightrft.models.types import (
    ActorOutput,
    EntropyMode,
    PolicyModel,
    Replayed,
    TokenLossFunction,
    ValueModel,
)
from lightrft.records.batch import (
    ExperienceBatch,
    PolicyOutputs,
    RolloutBatch,
    join_micro_batches,
    select_rollouts,
)
from lightrft.records.media import agree_on_kinds
from lightrft.records.table import (
    RowTable,
    SampleTable,
    episode_places,
    episodes_of,
)
from lightrft.rollout.source import Samples
from lightrft.strategy.backend import inner_module
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import StepTimer, phase
from lightrft.strategy.distributed.process_end import NumericsError

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine
    from lightrft.models.support import SamplingSupport
    from lightrft.models.types import HeadReader


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Settings of a step for turning rewards into advantages.

    Args:
        config: Discounts, clip ranges and the KL estimator.
        estimator: Turns rewards into advantages.
        kl_coef: Weight of the KL penalty in the reward; 0 is off.
        moments: Moments of all rewards before the step, or None without running normalisation.
        teacher_factors: Function for the weight of each row's teacher, [batch, 1]; None is 1 each.
    """

    config: TrainConfig
    estimator: AdvantageFunction
    kl_coef: float = 0.0
    moments: Moments | None = None
    teacher_factors: Callable[[RolloutBatch], Tensor] | None = None

    def reward_kl(self, outputs: PolicyOutputs, mask: Tensor) -> Tensor | None:
        """Return the KL penalty of each token in the reward, [batch, seq]; None if it is off."""
        if self.kl_coef == 0 or outputs.ref_logprobs is None:
            return None
        if outputs.old_logprobs is None:
            raise RuntimeError("a KL penalty in the reward needs the logprobs before the update")
        return estimate_kl(
            outputs.old_logprobs,
            outputs.ref_logprobs,
            mask,
            estimator=self.config.kl_estimator_name,
            old_logprobs=outputs.old_logprobs,
        )


@dataclass(frozen=True, slots=True)
class ShapedRewards:
    """Rewards of the rows of all ranks, as the estimator gets them.

    Args:
        rewards: [rows] float64.
        is_clipped: [rows] bool.
        moments: Moments of all rewards so far, or None without running normalisation.
        greedy_rewards: [rows] float64 of the greedy completions of their prompts, shaped alike, or
            None.
    """

    rewards: Tensor
    is_clipped: Tensor
    moments: Moments | None
    greedy_rewards: Tensor | None = None


def shape_rewards(
    table: RowTable,
    moments: Moments | None,
    config: ShapingOptions,
    *,
    greedy_rewards: Tensor | None = None,
) -> ShapedRewards:
    """Normalise by running moments, then clip, over the rows of all ranks.

    Args:
        table: Rows of the samples; excluded rows do not count in the moments.
        moments: Moments of all rewards before this step, or None without running normalisation.
        config: Options `reward_running_norm_minus_mean` and `reward_clip`.
        greedy_rewards: [rows] before shaping; they do not count in the moments.
    """
    rewards = torch.from_numpy(table.rewards)
    if moments is not None:
        episodes = episodes_of(table)  # whose rows come first
        once = rewards[: len(episodes)][torch.from_numpy(~episodes.is_masked)]
        moments = moments.merge(moments_of(once))

    def shaped(given: Tensor) -> tuple[Tensor, Tensor]:
        is_clipped = torch.zeros(len(table), dtype=torch.bool)
        if moments is not None:
            minus_mean = config.reward_running_norm_minus_mean
            given = normalize_rewards(given, moments, minus_mean=minus_mean)
        if config.reward_clip > 0:
            given, is_clipped = clip_rewards(given, limit=config.reward_clip)
        return given, is_clipped

    greedy = None if greedy_rewards is None else shaped(greedy_rewards)[0]
    return ShapedRewards(*shaped(rewards), moments, greedy)


def assemble(
    table: RowTable,
    rows: Tensor,
    rollouts: RolloutBatch,
    outputs: PolicyOutputs,
    shaped: ShapedRewards,
    *,
    settings: AdvantageSettings,
    context: DistributedContext,
) -> ExperienceBatch:
    """Return the experience of one rank.

    Args:
        table: Rows of all ranks.
        rows: [batch] int64, rows of `table` that `rollouts` holds.
        rollouts, outputs: This rank's rows.
        shaped: Rewards of the rows of `table`.
        settings: Settings of the estimation.
        context: Process groups, to sum the moments over all ranks.

    Raises:
        NumericsError: An advantage is not finite.
    """
    estimated = _estimate(table, rows, rollouts, outputs, shaped, settings)
    advantages, mask = estimated.advantages, rollouts.response_mask
    if advantage_traits(settings.estimator).whitens or settings.config.advantages_norm:
        moments = masked_moments(
            advantages, mask, sum_over_ranks=lambda sums: context.reduce_over_data(sums, "sum")
        )
        advantages = whiten(advantages, mask, moments)
    if outputs.teacher_logprobs is not None:
        term = teacher_advantages(outputs, mask, settings.config)
        if settings.teacher_factors is not None:
            term = term * settings.teacher_factors(rollouts)
        advantages = advantages + term
    clip = settings.config.advantage_clip
    if clip > 0:
        advantages = advantages.clamp(-clip, clip)
    if not bool(torch.isfinite(advantages).all()):
        bad = rollouts.sample_ids[~torch.isfinite(advantages).all(dim=1)].tolist()
        raise NumericsError(
            f"advantages must be finite: those of samples {bad[:10]} are not; look at their "
            "rewards, and at the logprobs of actor and reference model"
        )
    return ExperienceBatch(rollouts, outputs, advantages.float(), estimated.returns.float())


def _estimate(
    table: RowTable,
    rows: Tensor,
    rollouts: RolloutBatch,
    outputs: PolicyOutputs,
    shaped: ShapedRewards,
    settings: AdvantageSettings,
) -> TokenAdvantages:
    mask, config, greedy = rollouts.response_mask, settings.config, shaped.greedy_rewards
    kl = settings.reward_kl(outputs, mask)
    gamma: float | Tensor = config.gamma
    if config.turn_credit == "discounted":
        gamma = turn_discounts(mask, gamma=config.gamma)
    if advantage_traits(settings.estimator).is_token_level:
        local = shaped.rewards[rows].to(mask.device, torch.float32)
        # A running scale and a limit apply only to whole rewards.
        is_changed = config.reward_running_norm or config.reward_clip > 0
        paid = None if is_changed else rollouts.facts.get("turn_rewards")
        by_token = token_rewards(local, mask, kl=kl, kl_coef=settings.kl_coef, turn_rewards=paid)
        return estimate_token_advantages(
            settings.estimator,
            TokenAdvantageInputs(by_token, mask, outputs.values, gamma, config.lambd),
        )
    # Branches of an episode share its reward, which counts once.
    episodes, places = episodes_of(table), torch.from_numpy(episode_places(table))
    count = len(episodes)
    by_episode = estimate_row_advantages(
        settings.estimator,
        RowAdvantageInputs(
            rewards=shaped.rewards[:count],
            group_ids=torch.from_numpy(episodes.group_ids),
            lengths=torch.from_numpy(episodes.sampled_lengths),
            greedy_rewards=None if greedy is None else greedy[:count],
            is_scored=torch.from_numpy(~episodes.is_masked),
            components={
                name: torch.from_numpy(episodes.components[:, column])
                for column, name in enumerate(episodes.component_names)
            },
        ),
    )
    return broadcast_to_tokens(
        by_episode[places][rows].to(mask.device, torch.float32),
        mask,
        kl=kl,
        kl_coef=settings.kl_coef,
        gamma=gamma,
    )


def teacher_advantages(
    outputs: PolicyOutputs, mask: Tensor, config: SampledTeacherOptions
) -> Tensor:
    """Return teacher_coef (log p - log q) of the sampled tokens: [batch, seq], 0 outside the mask.

    Its mean over samples of q is minus the gradient of KL(q || p) at the token's prefix. q are the
    old logprobs. Like p they are the trainer's, so the engine's rounding is no signal and a teacher
    equal to the student gives 0. The loss takes its ratio to the same policy.

    Raises:
        RuntimeError: The old logprobs are missing.
    """
    if outputs.old_logprobs is None or outputs.teacher_logprobs is None:
        raise RuntimeError("a teacher's advantage needs the logprobs before the update")
    return config.teacher_coef * masked_difference(
        outputs.teacher_logprobs, outputs.old_logprobs, mask
    )


# A frozen policy that the student learns from: returns logprobs [batch, seq] float32 of this rank's
# sampled tokens, 0 elsewhere, in forward passes over the slices; collective.
TeacherFunction = Callable[[RolloutBatch, Sequence[slice]], Tensor]


@dataclass(frozen=True, slots=True)
class ForwardModels:
    """Models that score rollouts; None where the algorithm has no such model."""

    actor: PolicyModel
    reference: PolicyModel | None = None
    critic: ValueModel | None = None
    teacher: TeacherFunction | None = None


SEES_TEXTS = "teacher: rows have images, and a teacher sees texts: leave either out"


def compute_outputs(
    batch: RolloutBatch,
    models: ForwardModels,
    *,
    slices: Sequence[slice],
    scores_actor: bool = True,
) -> PolicyOutputs:
    """Return the models' outputs on all response tokens: logprobs, values and entropies.

    The models run one after the other: only one holds activations and gathered weights.

    Args:
        batch: This rank's rows.
        models: Models that score the rows.
        slices: Rows of each forward pass, in order; they cover the batch.
        scores_actor: False leaves the old logprobs and entropies to the update.
    """
    old: ActorOutput | None = None
    with torch.no_grad():
        if scores_actor:
            old = score_policy(models.actor, batch, slices=slices, entropy="value")
        # Only the policy that sampled was truncated; all are compared over the same ids.
        plain = replace(batch, support=batch.support and batch.support.of_logprobs)
        reference = teacher = None
        if models.reference is not None:
            scored = score_policy(models.reference, plain, slices=slices, entropy="none")
            reference = scored.logprobs
        if models.teacher is not None:
            if not plain.media.is_empty:  # from an environment: rows of data are refused earlier
                raise ConfigError(SEES_TEXTS)
            teacher = models.teacher(plain, slices)
        values = None
        if models.critic is not None:
            values = _evaluate(models.critic, batch, slices=slices)
    if old is None:
        return PolicyOutputs(None, reference, values, None, None, teacher)
    return PolicyOutputs(old.logprobs, reference, values, old.entropy, old.log_kept_mass, teacher)


@torch.no_grad()
def score_actor(batch: RolloutBatch, actor: PolicyModel, *, slices: Sequence[slice]) -> Tensor:
    """Return the actor's logprobs of all response tokens, in its present mode: [batch, seq].

    They are float32 and follow the distribution of the samples, without the excluded tokens.

    Args:
        batch: This rank's rows.
        actor: Actor, which every rank calls equally often.
        slices: Rows of each forward pass, in order; they cover the batch.
    """
    return score_policy(actor, batch, slices=slices, entropy="none").sampling_logprobs


def score_policy(
    policy: PolicyModel, batch: RolloutBatch, *, slices: Sequence[slice], entropy: EntropyMode
) -> ActorOutput:
    """Return outputs of all response tokens, in forward passes over slices that cover the batch."""
    micro_batches = (select_rollouts(batch, rows) for rows in slices)
    outputs = [
        run_policy(policy, micro, entropy=entropy, support=micro.support) for micro in micro_batches
    ]
    width = batch.token_ids.shape[1]

    def joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
        present = [piece for piece in pieces if piece is not None]
        return join_micro_batches(present, width) if present else None

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
    """Return the temperature for scoring samples; greedy samples are scored at 1."""
    return temperature if temperature > 0 else 1.0


def run_policy(
    policy: Callable[..., ActorOutput],
    rows: RolloutBatch,
    *,
    entropy: EntropyMode,
    support: SamplingSupport | None,
    token_loss: TokenLossFunction | HeadReader | None = None,
) -> ActorOutput:
    """Run one forward pass over rows.

    Args:
        policy: Model to call.
        rows: Rows of a micro-batch.
        entropy, support, token_loss: See `lightrft.models.Actor`.
    """
    inside = {} if token_loss is None else {"token_loss": token_loss}
    of_rows = None if support is None else support.of_rows(rows.facts)
    return policy(
        rows.token_ids,
        rows.attention_mask,
        scored_mask=rows.response_mask,
        temperature=scoring_temperature(rows.temperature),
        entropy=entropy,
        media=rows.media,
        recorded=Replayed(of_rows, rows.facts.get(ROUTES)),
        **inside,
    )


@dataclass(frozen=True, slots=True)
class StepExperience:
    """Rows that one rank trains on in one step, and facts of the step that all ranks know.

    Args:
        batch: This rank's rows, one optimizer batch after the other.
        rows: Rows with their tokens, before they were padded.
        samples: Samples of the step.
        rewards: Rewards of the rows of `table`, as the estimator got them.
        plan: Rows of `table` in each optimizer batch of each rank.
        version: Version of the weights at the start of the step.
    """

    batch: ExperienceBatch
    rows: SampleTable
    samples: Samples
    rewards: ShapedRewards
    plan: MinibatchPlan
    version: int = -1

    @property
    def table(self) -> RowTable:
        """Rows of all ranks."""
        return self.samples.table


def make_experience(
    samples: Samples,
    models: ForwardModels,
    *,
    delivery: Delivery,
    engine: RolloutEngine | None,
    settings: AdvantageSettings,
    step: int,
    timer: StepTimer,
    reuses_policy_logprobs: bool = False,
) -> StepExperience:
    """Make the experience of one step; collective.

    Args:
        samples, models: Samples of the step, and the models that score them.
        delivery: Route of the rows.
        engine: Engine with the weights at the start of the step, or None.
        settings: Settings for advantages in this step.
        step: Number that fixes the optimizer batches, together with the seed.
        timer: Measures the step.
        reuses_policy_logprobs: Leave old logprobs to the update if the step has one batch.
    """
    config, table, context = settings.config, samples.table, delivery.training
    rank, version = context.data_rank, version_at_start(samples, engine)
    source_ranks, encoder = delivery.generating or context, delivery.encoder
    with timer.stage("exchange"):
        plan, rows, prompts, evidence = deliver(
            samples, config, step, source_ranks, encoder, num_training=context.world_size
        )
        media = RowMedia()
        if encoder.reads_media:
            kinds = agree_on_kinds(context, RowMedia(prompts).kinds)
            media = RowMedia(prompts, encoder.blanks(kinds))
    batch = batch_of(samples, rows, media, config, plan, context, engine)
    slices = plan.forward_slices(table.lengths, rank=rank, config=config)
    if evidence is not None:
        from lightrft.experience.ledger_gate import check_ledger  # of runs with --ledger_gate

        with timer.stage("exchange"):
            evidence = replace(evidence, version=version, masks_truncated=config.mask_truncated)
            policy, made = choose_layout(models), (table, samples.greedy)
            check_ledger(batch, rows, evidence, made, policy=policy, slices=slices, context=context)
    is_known = config.use_rollout_logprobs or (reuses_policy_logprobs and plan.num_minibatches == 1)
    with timer.stage("forward"), phase("score", context.timeout):
        outputs = compute_outputs(batch, models, slices=slices, scores_actor=not is_known)
    if config.use_rollout_logprobs:
        outputs = replace(outputs, old_logprobs=engine_logprobs(batch))
    greedy = _greedy_rewards(samples)
    shaped = shape_rewards(table, settings.moments, config, greedy_rewards=greedy)
    experience = assemble(
        table,
        torch.from_numpy(plan.row_index(rank)),
        batch,
        outputs,
        shaped,
        settings=settings,
        context=context,
    )
    return StepExperience(experience, rows, samples, shaped, plan, version)


def choose_layout(models: ForwardModels) -> LayoutPolicy:
    """Return the layout policy of the actor."""
    actor = models.actor
    return layout_policy(inner_module(actor) if isinstance(actor, nn.Module) else actor)


def _greedy_rewards(samples: Samples) -> torch.Tensor | None:
    """Return the reward of the one greedy sample of each row's group: [rows of table] float64."""
    greedy = samples.greedy
    if greedy is None:
        return None
    by_group = dict(zip(greedy.group_ids.tolist(), greedy.rewards.tolist(), strict=True))
    return torch.tensor([by_group[group] for group in samples.table.group_ids.tolist()]).double()
