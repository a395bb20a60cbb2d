"""Program of a rank that only generates: it follows the commands of the ranks that train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightrft.config import SamplingOptions, TrainConfig
from lightrft.datasets.batch_stream import Batches, Draws, open_stream
from lightrft.datasets.types import Prompt
from lightrft.engines.types import SamplingParams
from lightrft.experience.delivery import deliver
from lightrft.records.media import media_of
from lightrft.reporting.files import SAMPLES_FILE
from lightrft.reporting.trajectories import SampleLog
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.sampler import RolloutSampler
from lightrft.rollout.source import InFlight, Samples, SourceParts
from lightrft.stages.policy.algorithm import decide
from lightrft.stages.policy.inputs import PolicyInputs
from lightrft.stages.policy.maker import SampleLogs
from lightrft.stages.policy.rewards import build_trainer_rewards
from lightrft.stages.policy.split.messages import DrawnReport, SampledStep, Start
from lightrft.stages.policy.step_metrics import rollout_means
from lightrft.strategy.backend import Backend
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import StepTimer
from lightrft.strategy.engine.session import EngineSession
from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy
from lightrft.strategy.split.bridge import Bridge
from lightrft.strategy.split.remote_engine import engine_handlers
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.sync import WeightSyncReport


def generating_options(config: SamplingOptions) -> dict[str, object]:
    """Return the options of a rank that trains nothing, valid for any number of ranks."""
    return {
        "fsdp": True,
        "zero_stage": TrainConfig.zero_stage,
        "sp_size": 1,
        "micro_train_batch_size": 1,
        "train_batch_size": config.rollout_batch_size * config.n_samples_per_prompt,
        "strict": False,
    }


def open_strategy(config: TrainConfig) -> StrategyBase:
    """Return the strategy of ranks that generate: for their engine and loader, without a model."""
    config = config.replaced(generating_options(config))
    sizes = (config.seed, config.max_norm, 1, config.train_batch_size)
    return FSDPV2Strategy(*sizes, args=config)


@dataclass(slots=True)
class Generator:
    """Rank that samples, scores and keeps rows until they are trained.

    Args:
        config: Options of the run, as the ranks that train have them.
        bridge: Bridge to the ranks that train.
        session: Engine of this side.
        context: Ranks of this side.
        loader: Prompts of this rank.
        sampler: Generates and scores.
        inputs: Prompts of training and evaluation.
        logs: Logs of samples.
        wants_stop: Returns whether this process was asked to stop.
    """

    config: TrainConfig
    bridge: Bridge
    session: EngineSession
    context: DistributedContext
    loader: Batches[Prompt]
    sampler: RolloutSampler
    inputs: PolicyInputs
    logs: SampleLogs
    wants_stop: Callable[[], bool]
    # By number of completed steps: an abandoned step falls back to the rows of the one before.
    flights: dict[int, InFlight] = field(default_factory=dict)
    _data: Draws[Prompt] | None = None
    _num_planned: int = 0
    _report: DrawnReport | None = None

    def handlers(self) -> dict[str, Callable[..., None]]:
        """Return the handler of each command."""
        handlers: dict[str, Callable[..., None]] = {
            "draw": self.draw,
            "drawn": lambda: self.bridge.answer(self._report),
            "save": self.save,
            "evaluate": self.evaluate,
        }
        return handlers | engine_handlers(self.session.running, self.bridge)

    def draw(
        self, number: int, last: int, start: Start | None, sync: WeightSyncReport | None
    ) -> None:
        """Give a step's rows to the ranks that train them, and sample the next steps.

        Args:
            number, last: Numbers of the step and of the last one to sample before its training.
            start: State to begin with, in the first step of a process.
            sync: Proved report of the sync of the sampling weights.
        """
        if start is not None:
            self._begin(number - 1, start)
        before, timer = self.flights[number - 1], StepTimer(number)
        session = self.session
        session.last_weight_sync = sync
        session.take_work()  # of an evaluation
        # If nothing is in flight, the step itself comes first: the training ranks wait for it.
        missing = range(number, number + (not before.held))
        flight, drawn = self._sample(before, missing, timer)
        self._give(number, flight.held[0])
        further = range(number + len(flight.held), last + 1)
        flight, more = self._sample(flight, further, timer)
        drawn += more
        trained, left = self.sampler.pop_step(before, flight, drawn)
        self._observe(trained)
        self.flights = {number - 1: before, number: left}
        self.inputs.environments.encoder.forget()
        work = session.take_work()
        self._report = DrawnReport(
            left.num_requests,
            left.num_requests - before.num_requests,
            sum(each.num_sampled_tokens for each in drawn),
            timer.seconds,
            work.busy_seconds,
            work.thin_seconds,
            self.bridge.take_received(),
            self.wants_stop(),
        )

    def _begin(self, num_steps: int, start: Start) -> None:
        context, self._num_planned = self.context, start.num_planned
        self.config = self.config.replaced({"shared_prefix": start.shared_prefix})
        self.flights[num_steps] = from_parts(
            start.parts,
            start.num_requests,
            rank=context.rank,
            world_size=context.world_size,
            media=media_of(self.inputs.prompts.prompts),
        )
        self._data = open_stream(
            self.loader,
            world_size=context.world_size,
            episode=start.episode,
            num_consumed=start.num_consumed,
            sampler_state=start.sampler_state,
        )

    def _sample(
        self, flight: InFlight, steps: range, timer: StepTimer
    ) -> tuple[InFlight, list[Samples]]:
        if self._data is None:
            raise RuntimeError("the first step comes without the state to begin with")
        draw = self._data.next_batch
        return self.sampler.fill_queue(
            flight,
            steps,
            draw=draw,
            next_prompts=draw,
            timer=timer,
            num_planned=self._num_planned,
        )

    def _observe(self, trained: Samples) -> None:
        """Pass the results of a step to the prompt sampler before the next step draws."""
        if self._data is not None:
            self._data.observe(trained.groups)

    def _give(self, number: int, samples: Samples) -> None:
        """Answer with the data of a step for all ranks, and send the rows to those that train."""
        side, evidence = self.bridge.side, samples.evidence
        samples = SampledStep.held_by(samples, side.num_training)
        known = replace(samples, scored=(), evidence=None, agent_counts=None)
        special = None if evidence is None else evidence.special_ids
        self.bridge.answer(SampledStep(known, special, rollout_means(samples)))
        encoder = self.inputs.environments.encoder
        with self.bridge.meeting():
            deliver(
                samples,
                self.config,
                number - 1,
                self.bridge,
                encoder,
                num_training=side.num_training,
            )
        self.logs.write_samples(number, samples.scored, self.context)

    def save(self, num_steps: int) -> None:
        """Send the rows in flight after so many steps, for a checkpoint."""
        self.bridge.answer(to_bytes(self.flights[num_steps], self.context.rank))

    def evaluate(self, params: SamplingParams) -> None:
        """Sample the held-out prompts."""
        _, table = self.sampler.sample_all(self.inputs.eval_prompts, params)
        self.bridge.answer(table if self.bridge.is_first else None)


def build_generator(
    config: TrainConfig,
    inputs: PolicyInputs,
    backend: Backend,
    session: EngineSession,
    loader: Batches[Prompt],
    bridge: Bridge,
    wants_stop: Callable[[], bool],
) -> Generator:
    """Build the generator of a rank whose engine has started."""
    config, algorithm = decide(config)
    reward, _ = build_trainer_rewards(inputs.reward, None, backend, config)
    environments = inputs.environments
    parts = SourceParts(session, config, inputs.tokenizer, reward, encoder=environments.encoder)
    sampler = RolloutSampler(
        parts,
        environments.source,
        needs_greedy=algorithm.estimator_traits.needs_greedy_rewards,
    )
    path = Path(config.output_dir) / SAMPLES_FILE
    logs = SampleLogs(
        SampleLog(path, has_rewards=config.has_rewards),
        rollouts=inputs.rollout_log(config, has_rewards=config.has_rewards),
    )
    return Generator(
        config, bridge, session, backend.context, loader, sampler, inputs, logs, wants_stop
    )
