"""Experience of a step: prompts are rolled out, scored by all models, and checked.

`PolicyMemory` is the state that one step leaves for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor, nn

from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.config import LearningOptions, TrainConfig
from lightrft.datasets.batch_stream import Draws, check_lengths
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import Media
from lightrft.engines.media.text_encoder import Encoder
from lightrft.experience.delivery import Delivery
from lightrft.experience.maker import (
    AdvantageSettings,
    ForwardModels,
    StepExperience,
    make_experience,
    score_actor,
)
from lightrft.models import Actor
from lightrft.records.batch import RolloutBatch
from lightrft.records.rollout import ScoredRollout
from lightrft.rewards.types import RewardError
from lightrft.rollout.sampler import RolloutSampler, training_params
from lightrft.rollout.scoring import MAX_FAILURES_IN_A_ROW
from lightrft.rollout.source import InFlight, Samples
from lightrft.stages.policy.algorithm import Algorithm
from lightrft.stages.stage import StageMemory, Step, last_sampled_step, stored_number
from lightrft.strategy.backend import inner_module
from lightrft.strategy.distributed.deadlines import StepTimer, phase

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from lightrft.experience.teachers import TeacherRows
    from lightrft.reporting.rollouts import RolloutLog
    from lightrft.reporting.trajectories import (
        DrawLog,
        SampleLog,
        ShownSamples,
        TrajectoryLog,
    )
    from lightrft.rollout.version_checks import SampledVersions
    from lightrft.stages.policy.parity import ParityReport
    from lightrft.stages.policy.split.training_side import RemoteRollouts
    from lightrft.strategy.backend import Backend
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.engine.session import EngineSession


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """Experience of a step, and further results of making it.

    Args:
        experience: Experience to train on.
        in_flight: Rows left to later steps.
        num_sampled_tokens: Tokens sampled in this step over all ranks.
        gate: Compares the update's logprobs [batch, seq] with the engine's; None if the comparison
            is done already or not due.
    """

    experience: StepExperience
    in_flight: InFlight
    num_sampled_tokens: int
    gate: Callable[[Tensor], object] | None = None


@dataclass(frozen=True, slots=True)
class SampleLogs:
    """Logs of samples, written on the first rank; None is no log."""

    samples: SampleLog | None = None
    trajectories: TrajectoryLog | None = None
    rollouts: RolloutLog | None = None
    shown: ShownSamples | None = None
    draws: DrawLog | None = None

    def write(
        self,
        step: int,
        experience: StepExperience,
        tokenizer: PreTrainedTokenizerBase,
        context: DistributedContext,
    ) -> None:
        """Append the samples of a step; collective."""
        self.write_samples(step, experience.samples.scored, context)
        if context.rank == 0 and self.trajectories is not None:
            self.trajectories.log(step, experience, tokenizer)
        if context.rank == 0 and self.shown is not None:
            self.shown.log(step, experience, tokenizer)
        if context.rank == 0 and self.draws is not None:
            self.draws.log(step, experience.samples.groups)

    def write_samples(
        self, step: int, scored: Sequence[ScoredRollout], context: DistributedContext
    ) -> None:
        """Append the samples that the sampling ranks know; collective among them."""
        if self.rollouts is not None:
            self.rollouts.log(step, scored, context)
        if context.rank == 0 and self.samples is not None:
            self.samples.log(step, scored)

    def close(self) -> None:
        """Close the files."""
        for log in (self.samples, self.trajectories, self.rollouts, self.draws):
            if log is not None:
                log.close()


@dataclass(frozen=True, slots=True)
class PolicyMemory(StageMemory):
    """Memory of reinforcement between steps.

    Args:
        kl: Controller of the KL weight.
        moments: Moments of all rewards so far, or None without running normalisation.
        num_undecided: Steps in a row in which the reward decided no sample.
        in_flight: Rows that later steps train on.
        rank, world_size: Rank that holds these rows, and number of ranks.
        media: Media of the prompts by id, where rows in flight may have some.
    """

    kl: KlController
    moments: Moments | None = None
    num_undecided: int = 0
    in_flight: InFlight = field(default_factory=InFlight)
    rank: int = 0
    world_size: int = 1
    media: Mapping[int, Media] = field(default_factory=dict)

    @classmethod
    def initial(
        cls,
        config: LearningOptions,
        rank: int = 0,
        world_size: int = 1,
        *,
        media: Mapping[int, Media] | None = None,
    ) -> PolicyMemory:
        """Return the memory of a rank before the first step."""
        kl = KlController(config.init_kl_coef, config.kl_target, config.kl_horizon)
        moments = Moments() if config.reward_running_norm else None
        return cls(kl, moments, rank=rank, world_size=world_size, media=media or {})

    @property
    def num_requests(self) -> int:
        """Prompts asked for so far, over all ranks."""
        return self.in_flight.num_requests

    def after_step(self, batch: PolicyBatch, *, kl: float | None) -> PolicyMemory:
        """Return the memory after one more step.

        Args:
            batch: Batch of the step.
            kl: Mean KL of a response to the reference model, or None without one; the weight does
                not change if it is not finite.
        """
        step, controller = batch.experience, self.kl
        if kl is not None and math.isfinite(kl):
            controller = controller.update(kl, num_samples=len(step.table))
        return replace(
            self,
            kl=controller,
            moments=step.rewards.moments,
            num_undecided=self.num_undecided + 1 if step.samples.is_undecided else 0,
            in_flight=batch.in_flight,
        )

    def to_client_state(self) -> dict[str, object]:
        """Return plain values for a checkpoint, with this rank's rows in flight."""
        from lightrft.rollout.in_flight import to_bytes

        moments = self.moments
        return {
            "num_requests": self.in_flight.num_requests,
            "carry": stored_bytes([to_bytes(self.in_flight, self.rank)]),
            "num_undecided": self.num_undecided,
            "kl_coef": self.kl.coef,
            "reward_moments": None
            if moments is None
            else [moments.count, moments.mean, moments.sum_of_squares],
        }

    def restored(self, client_state: Mapping[str, object]) -> PolicyMemory:
        """Return the memory with the values of a checkpoint; settings stay."""
        from lightrft.rollout.in_flight import from_parts

        moments, saved = self.moments, client_state["reward_moments"]
        if moments is not None and isinstance(saved, list):
            count, mean, squares = saved
            moments = Moments(int(count), mean, squares)
        parts = cast("str | list[NDArray[np.uint8]]", client_state["carry"])
        return replace(
            self,
            kl=replace(self.kl, coef=stored_number(client_state, "kl_coef")),
            moments=moments,
            in_flight=from_parts(
                # Checkpoints of older versions hold one string.
                [parts.encode()] if isinstance(parts, str) else [each.tobytes() for each in parts],
                int(stored_number(client_state, "num_requests")),
                rank=self.rank,
                world_size=self.world_size,
                media=self.media,
            ),
            num_undecided=int(stored_number({"num_undecided": 0, **client_state}, "num_undecided")),
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return name and state of each value, for the table of a continued run."""
        moments = self.moments
        return [
            ("kl_coef", f"{self.kl.coef:g}"),
            ("reward moments", "not used" if moments is None else f"of {moments.count} rewards"),
            ("rows in flight", self.in_flight.summary()),
        ]


def stored_bytes(parts: Sequence[bytes]) -> list[NDArray[np.uint8]]:
    """Return texts in a form for checkpoints."""
    return [np.frombuffer(bytearray(each), np.uint8) for each in parts]


@dataclass(slots=True)
class ExperienceMaker:
    """Maker of the experience of each step; it keeps nothing between steps.

    Args:
        config: Options of the run.
        algorithm: Estimator, loss and corrections.
        backend: Backend that prepared the models.
        session: Engine of these ranks.
        actor, models: Wrapped actor, and all models of the forward passes.
        sampler: Generates and scores.
        tokenizer: Tokenizer of the actor.
        encoder: Encoder of prompts with media.
        logs: Logs of samples.
        teacher_rows: Texts of the prompts for teachers, or None.
        remote: Rollouts of ranks that only generate; None where the training ranks sample.
        loss_inside: See `PolicyUpdate`.
    """

    config: TrainConfig
    algorithm: Algorithm
    backend: Backend
    session: EngineSession
    actor: nn.Module
    models: ForwardModels
    sampler: RolloutSampler
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    logs: SampleLogs
    teacher_rows: TeacherRows | None = None
    remote: RemoteRollouts | None = None
    loss_inside: bool = False
    _versions: SampledVersions | None = None

    @property
    def context(self) -> DistributedContext:
        """Ranks that train."""
        return self.backend.context

    def make(
        self, prompts: Sequence[Prompt] | None, step: Step, memory: PolicyMemory
    ) -> PolicyBatch:
        """Roll out equally many prompts on every rank and score the responses; collective.

        Args:
            prompts: This rank's prompts of the step; None draws them.
            step: Step with its number, timer, and data for further prompts.
            memory: Memory of the steps before.

        Raises:
            ValueError: There are no prompts, one is too long, or the number of samples is not a
                multiple of train_batch_size.
            ParityError: Engine and trainer disagree, or a student and a teacher with the same
                weights.
            RewardError: The reward decided no sample of several steps in a row.
        """
        versions = self._note_versions(step, memory)
        samples, in_flight, num_sampled_tokens = self._sample(prompts, step, memory)
        if versions is not None:
            versions.check(step.number, samples.table)
        if samples.is_undecided and memory.num_undecided + 1 == MAX_FAILURES_IN_A_ROW:
            raise RewardError(
                f"the reward decided no sample of {MAX_FAILURES_IN_A_ROW} steps in a row: look at "
                "its limits, and at the responses in samples.jsonl"
            )
        is_compared = self._compares(step)
        # Level 1 keeps the weights: explaining a difference reads the engine's layers.
        self.session.sleep(level=1 if is_compared else 2)
        experience = make_experience(
            samples,
            self.models,
            engine=self.session.engine,
            settings=AdvantageSettings(
                self.config,
                self.algorithm.estimator,
                kl_coef=0.0 if self.config.use_kl_loss else self.kl_coef(memory),
                moments=memory.moments,
                teacher_factors=self._teacher_factors(),
            ),
            step=step.number - 1,
            timer=step.timer,
            reuses_policy_logprobs=self.reuses_policy_logprobs(step),
            delivery=Delivery(
                self.context, self.encoder, None if self.remote is None else self.remote.bridge
            ),
        )
        gate, batch = None, experience.batch
        if step.number == 1 and self.models.teacher is not None:
            from lightrft.stages.policy.teacher import check_first_step

            slices, teacher = self._forward_slices(experience), self.models.teacher
            check_first_step(batch, teacher, slices, self.config, self.context)
        self._check_recorded(experience, step)
        if is_compared and batch.outputs.old_logprobs is None and not samples.skip_reason:
            gate = partial(self._compare, batch.rollouts)
        elif is_compared:
            self.check_parity(experience, step.timer)
        self.logs.write(step.number, experience, self.tokenizer, self.context)
        return PolicyBatch(experience, in_flight, num_sampled_tokens, gate)

    def _note_versions(self, step: Step, memory: PolicyMemory) -> SampledVersions | None:
        """Record which weights the engine has while this step samples ahead."""
        engine = self.session.engine
        if not (self.config.keeps_rows and self.config.ledger_gate) or engine is None:
            return None
        from lightrft.rollout.version_checks import SampledVersions

        if self._versions is None:
            self._versions = SampledVersions(self.config.stream_chunk is not None)
        steps = range(step.number, last_sampled_step(step, self.config) + 1)
        held = len(memory.in_flight.held) if step.is_first else 0
        self._versions.note(steps, engine.weights_version, num_held=held)
        return self._versions

    def _sample(
        self, prompts: Sequence[Prompt] | None, step: Step, memory: PolicyMemory
    ) -> tuple[Samples, InFlight, int]:
        """Return the samples to train on, the rows in flight afterwards, and the sampled tokens.

        Collective. With `rollout_lag` K, step t + K is sampled before step t is trained on. The
        first K + 1 steps are sampled before the first. The last result is a number.
        """
        if self.remote is not None:
            # The rows in flight and the number of tokens are known when the step is trained.
            return self.remote.draw(step, memory.in_flight), InFlight(), 0
        session, before = self.session, memory.in_flight
        session.take_work()  # of an evaluation
        first = step.number + len(before.held)
        passed = [] if prompts is None else [prompts]
        flight, drawn = self.sampler.fill_queue(
            before,
            range(first, last_sampled_step(step, self.config) + 1),
            draw=lambda: passed.pop() if passed else self._drawn(step),
            next_prompts=self._next_prompts(step),
            timer=step.timer,
            num_planned=step.num_planned if prompts is None else 0,
        )
        work = session.take_work()
        idle = step.timer.seconds.get("rollout", 0.0) - work.busy_seconds
        step.metrics.add_mean("idle_seconds", max(0.0, idle), 1.0)
        step.metrics.add_mean("thin_seconds", work.thin_seconds, 1.0)
        trained, left = self.sampler.pop_step(before, flight, drawn)
        return trained, left, sum(each.num_sampled_tokens for each in drawn)

    def _drawn(self, step: Step) -> Sequence[Prompt]:
        """Return this rank's part of the next prompts.

        Raises:
            ValueError: The step has no data.
        """
        if step.data is None:
            raise ValueError(
                "make_experience needs prompts: pass them, give prompts_dataloader= at "
                "construction, or call fit(prompts_dataloader=...)"
            )
        return cast("Draws[Prompt]", step.data).next_batch()

    def _teacher_factors(self) -> Callable[[RolloutBatch], Tensor] | None:
        rows = self.teacher_rows
        return rows.factors_of if rows is not None and rows.factors else None

    def _forward_slices(self, experience: StepExperience) -> Sequence[slice]:
        return experience.plan.forward_slices(
            experience.table.lengths, rank=self.context.data_rank, config=self.config
        )

    def kl_coef(self, memory: PolicyMemory) -> float:
        """Return the weight of the KL term; 0 without a reference model."""
        return 0.0 if self.models.reference is None else memory.kl.coef

    def _next_prompts(self, step: Step) -> Callable[[], Sequence[Prompt]] | None:
        data = cast("Draws[Prompt] | None", step.data)
        if data is None or not (self.config.dynamic_sampling or self.config.stream_chunk):
            return None

        def draw() -> Sequence[Prompt]:
            prompts = data.next_batch()
            check_lengths(prompts, self.config.prompt_max_len)
            return prompts

        return draw

    def _compares(self, step: Step) -> bool:
        every = self.config.parity_check_steps
        if every == 0 and self.config.stream_chunk is not None:
            every = 1  # responses span updates, and so would stale values in an engine's cache
        is_due = every >= 0 and (step.is_first or step.is_due(every))
        return is_due and self._can_compare

    @property
    def _can_compare(self) -> bool:
        engine = self.session.engine
        return engine is not None and engine.computes_model

    def reuses_policy_logprobs(self, step: Step) -> bool:
        """Return whether the pass of the update can provide the old logprobs."""
        log = self.logs.trajectories
        is_logged = log is not None and log.is_scheduled(step.number)
        has_kl_reward = self.models.reference is not None and not self.config.use_kl_loss
        return (
            not self.config.asks_policy_first
            and self._corrects_in_pass()
            and isinstance(inner_module(self.actor), Actor)
            and self.trains_actor(step)
            and not has_kl_reward
            and not is_logged
        )

    def _corrects_in_pass(self) -> bool:
        """Return whether corrections can use the logprobs of the update's forward pass."""
        terms = self.algorithm.corrections
        if not (terms and self.loss_inside):
            return not any(term.mean_one for term in terms)
        is_whole = not training_params(self.config).truncates
        return is_whole and all(term.is_token_wise for term in terms)

    def trains_actor(self, step: Step) -> bool:
        """Return whether the actor learns in a step (`freezing_actor_steps`)."""
        return step.number > self.config.freezing_actor_steps

    def check_parity(self, experience: StepExperience, timer: StepTimer) -> ParityReport | None:
        """Compare the logprobs of engine and trainer on an experience; collective.

        Returns:
            Report of the comparison; None if the engine does not compute the trainer's model.

        Raises:
            ParityError: They differ by more than rounding explains.
        """
        if not self._can_compare:
            return None
        logprobs = experience.batch.outputs.sampling_logprobs
        if logprobs is None or self.config.use_rollout_logprobs:
            with timer.stage("forward"), phase("score", self.context.timeout):
                slices = self._forward_slices(experience)
                logprobs = score_actor(experience.batch.rollouts, self.actor, slices=slices)
        return self._compare(experience.batch.rollouts, logprobs)

    def _check_recorded(self, experience: StepExperience, step: Step) -> None:
        """Compare what the engine recorded of its sampling with the trainer's; collective."""
        batch, table = experience.batch.rollouts, experience.table
        if experience.samples.skip_reason or not self._compares(step):
            return
        slices, metrics = self._forward_slices(experience), step.metrics
        with step.timer.stage("forward"), phase("score", self.context.timeout):
            if batch.support is not None and table["num_kept"].any():
                from lightrft.stages.policy.parity import limits_of
                from lightrft.stages.policy.supports import check_supports

                limits = limits_of(self.actor, self.backend, self.session, self.config.parity_limit)
                check_supports(batch, self.actor, slices, limits.mean, self.context, metrics)
            if table["num_route_bytes"].any():
                from lightrft.stages.policy.routes import check_routes

                check_routes(batch, self.actor, slices, self.context, metrics, self.config)
            elif step.is_first and self.config.routing_replay == "auto":
                actor = inner_module(self.actor)
                config = actor.config.get_text_config() if isinstance(actor, Actor) else None
                if hasattr(config, "num_experts_per_tok"):
                    self.context.print("routing_replay = off: the engine records no experts")

    def _compare(self, rollouts: RolloutBatch, logprobs: Tensor) -> ParityReport:
        from lightrft.stages.policy.parity import check_parity

        report = check_parity(
            rollouts,
            logprobs,
            self.actor,
            backend=self.backend,
            session=self.session,
            mean_limit=self.config.parity_limit,
        )
        self.context.print_detail(report.summary())
        return report
