"""The loop of a run: draw, update, sync; evaluation, logs, checkpoints, alarms, best model, stops.

It knows no algorithm: the stage draws and learns. A run's checkpoints are `ckpt_path`/_NAME for
each model in training; those of the main model hold its moving average, too.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from lightrft.config import ConfigError, RunControlOptions
from lightrft.datasets.batch_stream import Batches, Draws, open_stream
from lightrft.reporting.loggers import LoggerGroup, MetricsLogger
from lightrft.run.throughput import TrainingFlops, peak_tflops, training_flops, utilisation
from lightrft.stages.stage import (
    Stage,
    StageMemory,
    Step,
    TrainedModel,
    TrainedModels,
    Work,
    stored_number,
)
from lightrft.strategy.checkpoints.folders import SaveRequest
from lightrft.strategy.distributed.deadlines import StepTimer
from lightrft.strategy.distributed.process_end import NonFiniteError

if TYPE_CHECKING:
    from lightrft.run.callbacks import Callbacks
    from lightrft.strategy.checkpoints.checkpoints import Checkpoints


BEST_FOLDER = "best"
OPTIMIZER_OPTIONS = ("weight_decay", "betas", "eps", "rate_factor")
GIGABYTE = 2**30
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class BestModel:
    """The best evaluation so far.

    Args:
        value: Value of the metric; larger is better.
        step: Step after which it was reached; 0 is before training.
    """

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class LoopState:
    """Progress of a run.

    Args:
        num_steps: Completed steps.
        episode: Current pass over the data.
        num_consumed: Items of that pass already used, over all ranks.
        best: Best evaluation so far, or None.
        weights_version: Version of the engine when the next step is drawn; -1 is not known.
        sampler: Name and state of the prompt sampler; "" without one.
    """

    num_steps: int = 0
    episode: int = 0
    num_consumed: int = 0
    best: BestModel | None = None
    weights_version: int = -1
    sampler: str = ""

    def to_client_state(self) -> dict[str, object]:
        """Return plain values for a checkpoint."""
        return {
            "num_steps": self.num_steps,
            "episode": self.episode,
            "consumed_samples": self.num_consumed,
            "best": None if self.best is None else [self.best.value, self.best.step],
            "weights_version": self.weights_version,
            **({"sampler": self.sampler} if self.sampler else {}),
        }

    @classmethod
    def from_client_state(cls, client_state: Mapping[str, object]) -> LoopState:
        """Return the progress in a checkpoint.

        Raises:
            KeyError: A value is missing.
            ValueError: A value is of another kind.
        """
        best = client_state["best"]
        versions = {"weights_version": -1, **client_state}
        return cls(
            num_steps=int(stored_number(client_state, "num_steps")),
            episode=int(stored_number(client_state, "episode")),
            num_consumed=int(stored_number(client_state, "consumed_samples")),
            best=BestModel(float(best[0]), int(best[1])) if isinstance(best, list) else None,
            weights_version=int(stored_number(versions, "weights_version")),
            sampler=str(client_state.get("sampler", "")),
        )


def read_client_state(
    client_state: Mapping[str, object], memory: StageMemory
) -> tuple[LoopState, StageMemory]:
    """Return progress and the stage's memory of a checkpoint.

    Raises:
        ValueError: No run of this stage wrote it.
    """
    try:
        return LoopState.from_client_state(client_state), memory.restored(client_state)
    except KeyError as error:
        raise ValueError(
            f"the checkpoint holds no trainer state: {error} is missing from its client state "
            f"(it has {sorted(client_state)}); load it with load_module_only, or start anew"
        ) from error


def save_run(
    checkpoints: Checkpoints,
    config: RunControlOptions,
    client_state: Mapping[str, object],
    models: TrainedModels,
) -> None:
    """Write the models, their optimizers and schedulers, the generators, and the client state.

    The main model comes last and the others are kept one longer. A load looks for a checkpoint of
    the main model, which then always has theirs.
    """
    for trained in reversed(models.trained):
        is_main = trained is models.main
        request = SaveRequest(
            Path(str(config.ckpt_path)) / f"_{trained.name}",
            tag=f"global_step{client_state['num_steps']}",
            max_num=config.max_ckpt_num + (0 if is_main else 1),
            max_mem=math.ceil(config.max_ckpt_mem),
            client_state=client_state,
        )
        checkpoints.save(request, trained.prepared, models.average if is_main else None)


def load_run(
    checkpoints: Checkpoints,
    config: RunControlOptions,
    memory: StageMemory,
    models: TrainedModels,
) -> tuple[LoopState, StageMemory] | None:
    """Load the newest step with whole checkpoints of all models.

    Args:
        checkpoints, config: Checkpoints and their folder.
        memory: Memory of the stage before the load; it says what a checkpoint must hold.
        models: Models that receive the states.

    Returns:
        Progress and memory of that checkpoint; None if there is none.

    Raises:
        CheckpointError: There are checkpoints, but none of them is whole.
    """
    folders = [Path(str(config.ckpt_path)) / f"_{item.name}" for item in models.trained]

    def accepts(client_state: Mapping[str, object]) -> None:
        read_client_state(client_state, memory)

    tag = checkpoints.find(folders, accepts)
    progress = None
    for trained, folder in zip(models.trained, folders, strict=True) if tag is not None else ():
        with options_kept(trained):
            average = models.average if trained is models.main else None
            _, client_state = checkpoints.load(folder, tag, trained.prepared, model_ema=average)
        if trained is models.main:
            progress = read_client_state(client_state, memory)
    return progress


@contextmanager
def options_kept(trained: TrainedModel) -> Iterator[None]:
    """Restore this command's optimizer options after the body loads others.

    A checkpoint holds those of the run that wrote it: decay, moments and learning rates.
    """
    groups, schedule = trained.optimizer.param_groups, trained.scheduler
    options_before = [
        {name: group[name] for name in OPTIMIZER_OPTIONS if name in group} for group in groups
    ]
    peaks = [] if schedule is None else schedule.base_lrs
    yield
    groups = trained.optimizer.param_groups
    for group, options in zip(groups, options_before, strict=True):
        # Others keep their place, so that a continued run writes the bytes of an unbroken one.
        for name in set(OPTIMIZER_OPTIONS) - options.keys():
            group.pop(name, None)
        group.update(options)
    if schedule is None:
        return
    for group, before, peak in zip(groups, schedule.base_lrs, peaks, strict=True):
        if before != peak:
            group["lr"] *= peak / before if before else 1.0
    schedule.base_lrs = peaks


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The end of a loop.

    Args:
        num_steps: Completed steps, those before a resume included.
        first_eval: Metrics of the evaluation before the first step of this process; empty
            without evaluation data, or after a resume.
        last_eval: Metrics of the last evaluation.
        last_metrics: Metrics of the last step; empty if there was none.
        was_stopped: Whether the run was asked to stop before its last step.
        alarms: Alarms that ended the run (`stop_on_alarm`); empty if none did.
    """

    num_steps: int
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    last_metrics: dict[str, float]
    was_stopped: bool = False
    alarms: tuple[str, ...] = ()


class Loop(Generic[Batch]):
    """Steps of a stage, and the work of a run between them.

    Args:
        stage: Stage that draws and trains.
        loggers: Receivers of metrics on the first rank.
        callbacks: Calls around the steps, on every rank; None without.
    """

    def __init__(
        self,
        stage: Stage[Batch],
        loggers: Sequence[MetricsLogger],
        callbacks: Callbacks | None = None,
    ) -> None:
        self.stage, self.strategy = stage, stage.strategy
        self.state = LoopState()
        self._num_resumed = self._num_planned = 0
        self._data: Draws[object] | None = None
        self._costs: dict[str, TrainingFlops | None] = {}
        self._loggers = LoggerGroup(loggers if stage.strategy.is_rank_0() else ())
        self._callbacks = callbacks

    def take_data(self, loader: Batches[object]) -> None:
        """Draw from another loader, continuing at the run's position."""
        self.stage.loader, self._data = loader, None

    def run(self, num_steps: int, *, stop_request: Callable[[], bool] | None = None) -> LoopResult:
        """Train until `num_steps` steps are complete, or an alarm, a callback or a request stops.

        A request is answered before each step and between its drawing and its update; the drawn
        data is then dropped, and a resumed run draws it again.

        Args:
            num_steps: Number of steps, those before a resume included.
            stop_request: Function that every rank calls at least once a step; if it is true on one
                rank, all write a checkpoint and return. Either all ranks pass one or none.
        """
        first_eval = last_eval = metrics = dict[str, float]()
        if self.state.num_steps == 0:
            first_eval = last_eval = self.evaluate()
            self._keep_best(0, first_eval)
            if first_eval:
                self._loggers.log(0, first_eval)
        num_saved, was_stopped, is_drawn = -1, False, False
        ended_by: tuple[str, ...] = ()
        is_last = False
        self._num_planned = num_steps
        while self.state.num_steps < num_steps and not is_last:
            is_drawn = False
            if was_stopped := self._is_asked_to_stop(stop_request):
                break
            step = self.next_step()
            if self._callbacks is not None:
                self._callbacks.begin_step(step.number)
            batch, is_drawn = self.draw(step), True
            if was_stopped := self._is_asked_to_stop(stop_request):
                break
            with self._nothing_kept(step.number):
                metrics = self.update(batch, step)
            alarms = self._find_alarms(metrics)
            ended_by = alarms if self.stage.config.stop_on_alarm else ()
            is_last = bool(ended_by) or step.number == num_steps
            is_last, evaluated = self._end_step(step, metrics, is_last=is_last)
            last_eval = evaluated or last_eval
            if is_last or step.is_due(self.stage.config.save_steps):
                with self._nothing_kept(step.number):
                    self.save_checkpoint()
                num_saved = step.number
        if was_stopped and num_saved != self.state.num_steps:
            self.save_checkpoint(is_drawn=is_drawn)
        return LoopResult(
            self.state.num_steps, first_eval, last_eval, metrics, was_stopped, ended_by
        )

    def next_step(self) -> Step:
        """Return the step after the completed ones."""
        state, loader = self.state, self.stage.loader
        if self._data is None and loader is not None:
            self._data = open_stream(
                loader,
                world_size=self.strategy.world_size,
                episode=state.episode,
                num_consumed=state.num_consumed,
                sampler_state=state.sampler,
            )
        return Step(
            state.num_steps + 1,
            self._data,
            num_planned=self._num_planned,
            is_first=state.num_steps == self._num_resumed,
            timer=StepTimer(state.num_steps + 1),
        )

    def draw(self, step: Step) -> Batch:
        """Return the data of a step; collective."""
        self.prepare_to_draw()
        return self.stage.draw(step)

    def prepare_to_draw(self) -> None:
        """Give the engine its weights if it dropped them, and end training mode; collective."""
        engine = self.strategy.inference_engine if self.stage.syncs_engine else None
        if engine is not None and engine.weights_version >= 0 and engine.weights_were_dropped:
            self.strategy.update_engine_weights(self.stage.models.main.model)
        for trained in self.stage.models.trained:
            trained.model.eval()

    def update(self, batch: Batch, step: Step) -> dict[str, float]:
        """Train on drawn data, send the weights to the engine, and return metrics over all ranks.

        Names are sorted. Collective.
        """
        stage, strategy, metrics = self.stage, self.strategy, step.metrics
        models = stage.models.trained
        with step.timer.stage("train"):
            for trained in models:
                strategy.maybe_load_optimizer(trained.optimizer)
                trained.model.train()
            work = stage.update(batch, step)
            # Weights that are sent to the engine and verified are checked on their way.
            sync_verifies = stage.syncs_engine and stage.config.verify_weight_sync
            for trained in models:
                if trained is not stage.models.main or not sync_verifies:
                    strategy.require_finite(trained.model)
                strategy.maybe_offload_optimizer(trained.optimizer)
        if stage.syncs_engine:
            self._sync(step, work)
        for name, seconds in step.timer.seconds.items():
            metrics.add_max(f"{name}_seconds", seconds)
        for name, num_bytes in step.timer.memory_bytes.items():
            metrics.add_max(f"memory/{name}_gb", num_bytes / GIGABYTE)
        step_metrics = metrics.reduce(strategy.context)
        step_metrics["step_seconds"] = sum(
            step_metrics[f"{name}_seconds"] for name in step.timer.seconds
        )
        step_metrics |= self._utilisation(work, step_metrics["train_seconds"])
        sync = strategy.last_weight_sync
        if sync is not None:
            step_metrics |= {
                "weights_version": sync.weights_version,
                "engine_hash": sync.engine_hash,
            }
            if stage.config.lora_rank:
                step_metrics["weight_sync_bytes"] = sync.num_bytes
        step_metrics = stage.finish(batch, {**step_metrics, "global_step": step.number})
        self.state = replace(self.state, num_steps=step.number)
        if self._data is not None:
            self._data.observe(stage.results(batch))
            self.state = replace(
                self.state,
                episode=self._data.episode,
                num_consumed=self._data.num_consumed,
                sampler=self._data.sampler_state,
            )
        return dict(sorted(step_metrics.items()))

    def _sync(self, step: Step, work: Work) -> None:
        """Send the main model to the engine, and record whether its weights have changed."""
        main, before = self.stage.models.main, self._engine_hash
        with step.timer.stage("weight_sync"):
            self.strategy.update_engine_weights(main.model)
        if before and self._engine_hash and main.name in work.models:
            step.metrics.add_max("weights_changed", float(before != self._engine_hash))

    @contextmanager
    def _nothing_kept(self, step: int) -> Iterator[None]:
        """Add to an error for values that are not finite the step and the remedy.

        Raises:
            NonFiniteError: Replacement of the body's error.
        """
        try:
            yield
        except NonFiniteError as error:
            raise NonFiniteError(
                f"after step {step} {error}; nothing of this step was saved: continue from the "
                "checkpoint before it with --allow_changes and, say, a smaller learning rate"
            ) from error

    @property
    def _engine_hash(self) -> int:
        """Return the hash of the engine's weights; 0 if they are not known."""
        report = self.strategy.last_weight_sync
        return 0 if report is None else report.engine_hash

    def _utilisation(self, work: Work, seconds: float) -> dict[str, float]:
        """Return the speed of an update of this duration; {} if nothing was computed."""
        if not len(work.lengths):
            return {}
        for trained in self.stage.models.trained:
            if trained.name not in self._costs:
                source = self.strategy.parameter_source(trained.model)
                self._costs[trained.name] = training_flops(trained.model, source)
        return utilisation(
            [cost for name in work.models if (cost := self._costs[name]) is not None],
            work,
            seconds=seconds,
            num_devices=self.strategy.world_size,
            peak=peak_tflops(self.stage.config),
        )

    def evaluate(self) -> dict[str, float]:
        """Return metrics of held-out data; {} without; collective."""
        self.prepare_to_draw()
        begin = time.perf_counter()
        metrics = self.stage.evaluate()
        if metrics:
            if self.stage.config.enable_engine_sleep:
                self.strategy.maybe_sleep_inference_engine()
            metrics["eval/seconds"] = time.perf_counter() - begin
        return metrics

    def _end_step(
        self, step: Step, metrics: Mapping[str, float], *, is_last: bool
    ) -> tuple[bool, dict[str, float]]:
        """Evaluate if that is due, call the callbacks and log.

        Returns:
            Whether it is the last step, which a callback may decide; and the evaluation, if any.
        """
        number, evaluated = step.number, dict[str, float]()
        if is_last or step.is_due(self.stage.config.eval_steps):
            evaluated = self._evaluated_after(number)
        shown = {**metrics, **evaluated}
        if self._callbacks is not None:
            shown = self._callbacks.end_step(number, shown)
        if not is_last and self._callback_stops():
            is_last, evaluated = True, evaluated or self._evaluated_after(number)
            shown |= evaluated
        self._loggers.log(number, shown)
        return is_last, evaluated

    def _evaluated_after(self, step: int) -> dict[str, float]:
        """Return metrics of held-out data after a step; keep its model if it is the best."""
        metrics = self.evaluate()
        self._keep_best(step, metrics)
        return metrics

    def _find_alarms(self, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """Warn about numbers out of bounds, a line each, and return the sentences."""
        alarms = self.stage.alarms(metrics)
        for text in alarms:
            self.strategy.print(f"warning: alarm after step {self.state.num_steps}: {text}")
        return tuple(alarms)

    def _is_asked_to_stop(self, stop_request: Callable[[], bool] | None) -> bool:
        """Return whether any rank was asked to stop; all ranks return the same."""
        if stop_request is None:
            return False
        return self.strategy.all_reduce(int(stop_request()), op="max") > 0

    def _callback_stops(self) -> bool:
        """Return whether a callback of any rank ends the run; all ranks return the same."""
        if self._callbacks is None:
            return False
        return self.strategy.all_reduce(int(self._callbacks.wants_stop()), op="max") > 0

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save the main model in `ckpt_path`/best if `best_metric` was never better; collective.

        The table of metrics says whether larger or smaller values are better.

        Raises:
            ConfigError: The evaluation lacks this metric; the message lists those it has.
        """
        from lightrft.reporting.metric_table import larger_is_better

        config, best = self.stage.config, self.state.best
        metric = config.best_metric
        if metric is None or config.ckpt_path is None or not metrics:
            return
        if metric not in metrics:
            raise ConfigError(
                f"best_metric: the evaluation has no {metric!r}, it has "
                f"{', '.join(sorted(metrics))}"
            )
        value, sign = metrics[metric], 1 if larger_is_better(metric) else -1
        # NaN, when an evaluation could decide nothing, is never better.
        if not sign * value > (-math.inf if best is None else sign * best.value):
            return
        folder = Path(config.ckpt_path) / BEST_FOLDER
        partial, former = (folder.with_name(f"best.{kind}") for kind in ("partial", "former"))
        self.save_model(partial)
        if self.strategy.is_rank_0():
            # The former best stays in place until the new one is complete.
            shutil.rmtree(former, ignore_errors=True)
            if folder.exists():
                folder.rename(former)
            partial.rename(folder)
            shutil.rmtree(former, ignore_errors=True)
        self.strategy.barrier()
        which = "the largest" if sign > 0 else "the smallest"
        self.strategy.print(
            f"best {metric} so far: {value:.6g}, {which}, after step {step}, saved in {folder}"
        )
        self.state = replace(self.state, best=BestModel(value, step))

    def save_model(self, folder: Path, *, is_average: bool = False) -> None:
        """Write the main model, or its moving average, in a format that others load; collective."""
        models = self.stage.models
        model = models.average if is_average else models.main.model
        if model is not None:
            self.strategy.save_model(model, self.stage.text_part, str(folder))

    def save_checkpoint(self, *, is_drawn: bool = False) -> None:
        """Write all that a run needs to continue; do nothing without `ckpt_path`.

        Args:
            is_drawn: The next step was drawn, and is drawn again with the same weights.
        """
        config, stage = self.stage.config, self.stage
        if config.ckpt_path is not None:
            engine = self.strategy.inference_engine if stage.syncs_engine else None
            if engine is not None and engine.weights_version >= 0:
                # Dropped weights are sent once more before the next step is drawn.
                version = engine.weights_version + int(engine.weights_were_dropped and not is_drawn)
                self.state = replace(self.state, weights_version=version)
            client_state = {**self.state.to_client_state(), **stage.client_state()}
            save_run(self.strategy.checkpoints, config, client_state, stage.models)

    def load_checkpoint(self) -> bool:
        """Continue from the newest complete checkpoint under `ckpt_path`, if there is one.

        The engine gets the loaded weights.

        Returns:
            Whether there was a checkpoint.
        """
        stage = self.stage
        if stage.config.ckpt_path is None:
            return False
        loaded = load_run(self.strategy.checkpoints, stage.config, stage.memory, stage.models)
        if loaded is None:
            return False
        self.state, stage.memory = loaded
        self._num_resumed, self._data = self.state.num_steps, None
        if stage.syncs_engine:
            self.strategy.update_engine_weights(stage.models.main.model)
            engine = self.strategy.inference_engine
            if engine is not None and self.state.weights_version >= 0:
                engine.set_weights_version(self.state.weights_version)
        stage.resumed()
        return True

    def close(self) -> None:
        """Close the loggers, and the files of the stage."""
        self._loggers.close()
        self.stage.close()
