"""The experience of a step: prompts are rolled out, scored by all models, and checked.

`PolicyMemory` is what one step leaves for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from torch import nn

from lightrft.algorithms.kl import KlController
from lightrft.algorithms.moments import Moments
from lightrft.config import TrainConfig
from lightrft.datasets.batch_stream import BatchStream, check_lengths
from lightrft.datasets.types import Prompt
from lightrft.engines.media.encoder import Encoder
from lightrft.experience.maker import (
    AdvantageSettings,
    ForwardModels,
    StepExperience,
    make_experience,
    score_actor,
)
from lightrft.rewards.types import RewardError
from lightrft.rollout.sampler import RolloutSampler
from lightrft.rollout.scoring import MAX_FAILURES_IN_A_ROW
from lightrft.rollout.source import PartialRolloutState
from lightrft.stages.policy.algorithm import Algorithm
from lightrft.stages.policy.models import is_deterministic
from lightrft.stages.policy.teacher import check_first_step
from lightrft.stages.stage import Step, stored_number
from lightrft.strategy.distributed.deadlines import StepTimer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.reporting.rollouts import RolloutLog
    from lightrft.reporting.trajectories import SampleLog, TrajectoryLog
    from lightrft.stages.policy.parity import ParityReport
    from lightrft.strategy.distributed.context import DistributedContext
    from lightrft.strategy.strategy_base import StrategyBase


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """Experience of a step, and the comparison of engine and trainer if it was due."""

    experience: StepExperience
    parity: ParityReport | None = None


@dataclass(frozen=True, slots=True)
class SampleLogs:
    """Files that samples of each step are written to, on the first rank; None is absent."""

    samples: SampleLog | None = None
    trajectories: TrajectoryLog | None = None
    rollouts: RolloutLog | None = None

    def write(
        self,
        step: int,
        experience: StepExperience,
        tokenizer: PreTrainedTokenizerBase,
        context: DistributedContext,
    ) -> None:
        """Appends the samples of a step; collective."""
        scored = experience.samples.scored
        if self.rollouts is not None:
            self.rollouts.log(step, scored, context)
        if context.rank != 0:
            return
        if self.samples is not None:
            self.samples.log(step, scored)
        if self.trajectories is not None:
            self.trajectories.log(step, experience, tokenizer)

    def close(self) -> None:
        """Closes the files."""
        for log in (self.samples, self.trajectories, self.rollouts):
            if log is not None:
                log.close()


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Memory of reinforcement between steps.

    Args:
        kl: Weight of the KL term.
        moments: Of all rewards so far, or None without running normalisation.
        num_requests: Prompts rolled out so far, over all ranks; the id of the next request.
        num_undecided: Steps in a row of which the reward decided no sample.
        carry: Responses that are not finished yet.
    """

    kl: KlController
    moments: Moments | None = None
    num_requests: int = 0
    num_undecided: int = 0
    carry: PartialRolloutState = field(default_factory=PartialRolloutState)

    @classmethod
    def initial(cls, config: TrainConfig) -> PolicyMemory:
        """The memory before the first step."""
        kl = KlController(config.init_kl_coef, config.kl_target, config.kl_horizon)
        return cls(kl, Moments() if config.reward_running_norm else None)

    def after_step(self, step: StepExperience, *, kl: float | None) -> PolicyMemory:
        """The memory after one more step.

        Args:
            step: What was trained on.
            kl: Mean KL to the reference model of a response, or None without one; the weight
                stays as it is where that is not finite.
        """
        partial = step.samples.partial
        controller = self.kl
        if kl is not None and math.isfinite(kl):
            controller = controller.update(kl, num_samples=len(step.table))
        return PolicyMemory(
            kl=controller,
            moments=step.rewards.moments,
            num_requests=self.num_requests + step.samples.num_prompts,
            num_undecided=self.num_undecided + 1 if step.samples.is_undecided else 0,
            carry=self.carry if partial is None else partial.carry,
        )

    def to_client_state(self) -> dict[str, object]:
        """See `StageMemory`."""
        found = self.moments
        return {
            "num_requests": self.num_requests,
            "num_undecided": self.num_undecided,
            "kl_coef": self.kl.coef,
            "carry": self.carry.to_json(),
            "reward_moments": None
            if found is None
            else [found.count, found.mean, found.sum_of_squares],
        }

    def restored(self, client_state: Mapping[str, object]) -> PolicyMemory:
        """See `StageMemory`; how to adapt and shape stays as it is."""
        moments, saved = self.moments, client_state["reward_moments"]
        if moments is not None and isinstance(saved, list):
            count, mean, squares = saved
            moments = Moments(int(count), mean, squares)
        return PolicyMemory(
            kl=replace(self.kl, coef=stored_number(client_state, "kl_coef")),
            moments=moments,
            num_requests=int(stored_number(client_state, "num_requests")),
            num_undecided=int(stored_number({"num_undecided": 0, **client_state}, "num_undecided")),
            carry=PartialRolloutState.from_json(client_state["carry"]),
        )

    def rows(self) -> list[tuple[str, str]]:
        """See `StageMemory`."""
        moments = self.moments
        return [
            ("kl_coef", f"{self.kl.coef:g}"),
            ("reward moments", "not used" if moments is None else f"of {moments.count} rewards"),
        ]


@dataclass(slots=True)
class ExperienceMaker:
    """Makes the experience of one step after another; holds nothing of them.

    Args:
        config: Options of the run.
        algorithm: Estimator, loss and corrections.
        strategy: Hosts the engine, and knows this rank's part.
        models: Actor, reference and critic as the strategy wrapped them.
        sampler: Generates and scores.
        tokenizer: Of the actor.
        encoder: Of prompts with media.
        logs: Receive samples.
    """

    config: TrainConfig
    algorithm: Algorithm
    strategy: StrategyBase
    actor: nn.Module
    models: ForwardModels
    sampler: RolloutSampler
    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    logs: SampleLogs

    def make(self, prompts: Sequence[Prompt], step: Step, memory: PolicyMemory) -> PolicyBatch:
        """Rolls out prompts, as many on every rank, and scores the responses; collective.

        Args:
            prompts: This rank's part of the step's prompts.
            step: Its number, timer, and data for further prompts.
            memory: Of the steps before.

        Raises:
            ValueError: A prompt is too long, or the number of samples is not a multiple of
                train_batch_size.
            ParityError: Engine and trainer disagree, or a student and a teacher of the same
                weights.
            RewardError: The reward decided no sample of several steps in a row.
        """
        check_lengths(prompts, self.config.prompt_max_len)
        samples = self.sampler.collect(
            prompts,
            first_request_id=memory.num_requests,
            timer=step.timer,
            next_prompts=self._next_prompts(step),
            carry=memory.carry,
            step=step.number,
        )
        if samples.is_undecided and memory.num_undecided + 1 == MAX_FAILURES_IN_A_ROW:
            raise RewardError(
                f"the reward decided no sample of {MAX_FAILURES_IN_A_ROW} steps in a row: look at "
                "its limits, and at the responses in samples.jsonl"
            )
        is_compared = self._compares(step)
        if is_compared:
            # A difference is explained by looking into the engine's layers.
            self.strategy.maybe_sleep_inference_engine()
        else:
            self.strategy.sleep_until_weight_sync()
        experience = make_experience(
            samples,
            self.models,
            strategy=self.strategy,
            settings=AdvantageSettings(
                self.config,
                self.algorithm.estimator,
                kl_coef=0.0 if self.config.use_kl_loss else self.kl_coef(memory),
                moments=memory.moments,
            ),
            step=step.number - 1,
            timer=step.timer,
            reuses_policy_logprobs=self.reuses_policy_logprobs(step),
            encoder=self.encoder,
        )
        if step.number == 1 and self.config.teacher is not None:
            check_first_step(experience.batch, self.config, self.strategy)
        parity = self.check_parity(experience, step.timer) if is_compared else None
        self.logs.write(step.number, experience, self.tokenizer, self.strategy.context)
        return PolicyBatch(experience, parity)

    def kl_coef(self, memory: PolicyMemory) -> float:
        """Weight of the KL term; 0 without a reference model."""
        return 0.0 if self.models.reference is None else memory.kl.coef

    def _next_prompts(self, step: Step) -> Callable[[], Sequence[Prompt]] | None:
        data = cast("BatchStream[Prompt] | None", step.data)
        if data is None or not (self.config.dynamic_sampling or self.config.partial_rollout):
            return None

        def draw() -> Sequence[Prompt]:
            prompts = data.next_batch()
            check_lengths(prompts, self.config.prompt_max_len)
            return prompts

        return draw

    def _compares(self, step: Step) -> bool:
        every = self.config.parity_check_steps
        return every >= 0 and (step.is_first or (every > 0 and step.number % every == 0))

    def reuses_policy_logprobs(self, step: Step) -> bool:
        """Whether nobody needs the old logprobs before the one update that computes them too."""
        log = self.logs.trajectories
        is_logged = log is not None and log.is_due(step.number)
        has_kl_reward = self.models.reference is not None and not self.config.use_kl_loss
        has_teacher = self.models.teacher is not None
        return (
            self.config.max_epochs == 1
            and not self.config.high_entropy_token_ratio
            and not self.algorithm.corrections
            and is_deterministic(self.strategy.unwrap_model(self.actor))
            and self.trains_actor(step)
            and not has_kl_reward
            and not has_teacher
            and not is_logged
        )

    def trains_actor(self, step: Step) -> bool:
        """Whether the actor learns in a step (`freezing_actor_steps`)."""
        return step.number > self.config.freezing_actor_steps

    def check_parity(self, experience: StepExperience, timer: StepTimer) -> ParityReport | None:
        """Compares the engine's logprobs of an experience with the trainer's; collective.

        Returns:
            What was found; None if the engine does not compute the trainer's model.

        Raises:
            ParityError: They differ by more than rounding explains.
        """
        engine, batch = self.strategy.inference_engine, experience.batch
        if engine is None or not engine.computes_model:
            return None
        from lightrft.stages.policy.parity import check_parity

        logprobs = batch.outputs.sampling_logprobs
        if logprobs is None or self.config.use_rollout_logprobs:
            rows = experience.plan.forward_slices(
                experience.table.lengths, rank=self.strategy.data_rank, config=self.config
            )
            with timer.stage("forward"):
                logprobs = score_actor(batch.rollouts, self.actor, slices=rows)
        report = check_parity(
            batch.rollouts,
            logprobs,
            self.actor,
            strategy=self.strategy,
            mean_limit=self.config.parity_limit,
        )
        self.strategy.context.print_detail(report.summary())
        return report
