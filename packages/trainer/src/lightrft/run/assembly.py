"""A whole run from one configuration: inputs, strategy, stage, loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import (
    BuildOptions,
    LearningOptions,
    OutputOptions,
    RunControlOptions,
    TrainConfig,
)
from lightrft.config.files import held_folder
from lightrft.config.parts.training import default_learning_rate
from lightrft.config.registry import STAGES, START_HOOKS, keyword_options
from lightrft.config.toml import write_whole
from lightrft.engines.libraries import check_library
from lightrft.reporting.alarms import run_verdict
from lightrft.reporting.console import RunConsole
from lightrft.reporting.files import (
    CONFIG_FILE,
    METRICS_FILE,
    START_FILE,
    SUMMARY_FILE,
    JsonLines,
    rank_log,
    read_json,
    set_aside,
)
from lightrft.reporting.loggers import (
    JsonLinesLogger,
    MetricsLogger,
    notebook_loggers,
    rank_timeline,
)
from lightrft.reporting.metric_table import PEAK_NOTE, memory_peaks, planned_phase
from lightrft.run.loop import Loop, LoopResult
from lightrft.run.provenance import write_model_run
from lightrft.run.resume import (
    RunPlan,
    media_sha256,
    plan_run,
    remembered_media,
    require_media,
    require_unchanged,
)
from lightrft.run.start import end_run, sole_writer, start_run
from lightrft.run.threads import choose_threads
from lightrft.stages.metrics import RunAlarmError
from lightrft.stages.stage import StageInputs
from lightrft.strategy import get_strategy
from lightrft.strategy.distributed.context import console_sink, print_on_first_rank
from lightrft.strategy.distributed.deadlines import peak_bytes, phase, phase_of
from lightrft.strategy.distributed.process_end import RunStoppedError
from lightrft.strategy.distributed.process_groups import LaunchEnvironment
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from lightrft.run.callbacks import Callback, Callbacks
    from lightrft.strategy.engine.session import EngineSession

EMA_FOLDER = "model_ema"
StopCondition = Callable[[], bool]
# Gives a session the engines of other ranks, and returns the check for a stop.
JoinEngines = Callable[["EngineSession", StopCondition], StopCondition]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run; written to `summary.json`.

    Args:
        output_dir, model_dir: Folders of the results.
        num_steps: Completed steps, those before a resume included.
        num_resumed_steps: Steps from a checkpoint.
        world_size: Processes.
        strategy, engine: Names of the backend and of the rollout engine.
        seconds: Duration of this process's part, evaluations included.
        first_eval, last_eval: Metrics of the first and the last evaluation; {} without eval_data.
        last_metrics: Metrics of the last step.
        verdict: "trained: ..." or "no update: ...", see `run_verdict`; then the reason if the run
            ended early.
        alarms: Alarms that ended it (`stop_on_alarm`).
        memory: See `memory_peaks`.
    """

    output_dir: str
    model_dir: str
    num_steps: int
    num_resumed_steps: int
    world_size: int
    strategy: str
    engine: str
    seconds: float
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    last_metrics: dict[str, float]
    verdict: str
    alarms: tuple[str, ...] = ()
    memory: dict[str, dict[str, float]] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the verdict, the folders and the main numbers."""
        rows = {"verdict": self.verdict, "model": self.model_dir}
        rows["steps"] = f"{self.num_steps} in {self.seconds:.0f} s"
        for name, value in self.last_eval.items():
            if name in self.first_eval:
                rows[name] = f"{self.first_eval[name]:.4g} -> {value:.4g}"
        for name in ("reward", "loss", "accuracy", "margin"):
            if name in self.last_metrics:
                rows[name] = f"{self.last_metrics[name]:.4g}"
        cells = (f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in rows.items())
        return f"<table>{''.join(cells)}</table>"


def run_training(
    config: TrainConfig,
    *,
    stage: str = "policy",
    loggers: Sequence[MetricsLogger] = (),
    callbacks: Sequence[Callback] = (),
    stop_request: Callable[[], bool] | None = None,
    plan: RunPlan | None = None,
) -> RunSummary:
    """Train as one process of a run, whose rank is in the environment.

    All possible mistakes of a user are checked first. The folder `config.output_dir` gets
    config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/, model/ and summary.json.

    Args:
        config: Options of the run.
        stage: Name or import string of the stage, see `config.registry.STAGES`.
        loggers: Further receivers of metrics on the first rank.
        callbacks: Callbacks around the steps on every rank.
        stop_request: Function that returns whether to stop this process; then all ranks stop.
        plan: Decision about the folder, if it was made; None makes it here.

    Raises:
        RunStoppedError: The run was asked to stop; it can be continued.
        RunAlarmError: An alarm ended the run; all its files are written.
        ConfigError: Options that cannot be run, or a used folder that they would spoil.
        DataError, ModelLoadError: Prompts, or a model or tokenizer, that cannot be read.
        RewardError: A reward function that cannot be loaded, or that fails.
        LibraryError: torch or transformers lacks a name that is used.
    """
    joined = None
    if callbacks:
        from lightrft.run.callbacks import Callbacks, require_callbacks

        require_callbacks(callbacks)
        joined = Callbacks(callbacks)
    for library in ("torch", "transformers"):
        check_library(library)
    config = config.with_installed_backend()
    if stage == "policy":
        config = config.overlapped(LaunchEnvironment.read().world_size)
    train = partial(_train, stage=stage, loggers=loggers, callbacks=joined, plan=plan)
    is_asked = stop_request or (lambda: False)
    with _without_bars():
        if not config.rollout_ranks:
            return train(config, is_asked)
        from lightrft.run.split_run import both_end, generate_for, join_engines, open_bridge

        with open_bridge(config) as bridge:
            if bridge.side.generates:
                return cast("RunSummary", generate_for(config, bridge, is_asked))
            with both_end(bridge) as summary:
                summary.append(train(config, is_asked, partial(join_engines, bridge, config)))
            return cast("RunSummary", summary[0])


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for every checkpoint that it reads or writes."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


# Options of ranks that train while others generate.
_NO_ENGINE = {"enable_engine_sleep": False, "engine_tp_size": 1}


def _train(
    config: TrainConfig,
    stop_request: Callable[[], bool],
    join: JoinEngines | None = None,
    *,
    stage: str,
    loggers: Sequence[MetricsLogger],
    callbacks: Callbacks | None,
    plan: RunPlan | None,
) -> RunSummary:
    """Train as one process; `join` connects it to ranks that only generate."""
    started = time.perf_counter()
    with ExitStack() as stack:
        plan = plan or plan_run(config, stage)
        if plan.summary:
            return _nothing_left(config, plan.summary)
        command_config, config = config, config.replaced(plan.kept)
        if join is not None:
            config = config.replaced(_NO_ENGINE)
        rate = _default_rate(config, stage)
        config = config.replaced(rate)
        read = cast("Callable[[TrainConfig], StageInputs]", STAGES.load(stage))
        folder, rank = Path(config.output_dir), int(os.environ.get("RANK", "0"))
        console: RunConsole | None = None
        media = ""
        with remembered_media(config, writes=rank == 0):
            inputs = read(config)
            stack.callback(inputs.close)
            if rank == 0:
                stack.enter_context(sole_writer(folder))
                require_unchanged(command_config, plan)
                console = open_console(config, stack)
                with phase("hash images and sounds", 60 * config.timeout_minutes):
                    media = media_sha256(inputs.media_digests())
        if rank == 0:
            if plan.resumes:
                require_media(config, media)
            notes = [f"{name} = {value}: the default of {stage}" for name, value in rate.items()]
            _open_folder(config, plan, notes)
        for each in (rank_log(folder, rank), held_folder(folder), rank_timeline(folder, rank)):
            stack.enter_context(each)
        if console is not None:
            lines = JsonLinesLogger(folder / METRICS_FILE)
            loggers = (console, lines, *notebook_loggers(), *_asked_loggers(config), *loggers)
        strategy = stack.enter_context(get_strategy(config))
        if join is not None:
            stop_request = join(strategy.session, stop_request)
        config = _ready(config, strategy, stage=stage, inputs=inputs, resumes=plan.resumes)
        stack.enter_context(_memory_noted(config, strategy.context.planned_bytes))
        loop = Loop(inputs.build(config, strategy), loggers, callbacks)
        # The models themselves may have refused to pack, or to share prefixes.
        names = ("packing_samples", "shared_prefix")
        config = config.replaced({name: vars(loop.stage.config)[name] for name in names})
        stack.callback(loop.close)
        num_planned = loop.stage.planned_steps()
        num_resumed = start_run(config, loop, plan, stage, media, given=command_config)
        if console is not None:
            console.plan(num_planned, after=num_resumed)
        result = loop.run(num_planned, stop_request=stop_request)
        return finish_run(config, loop, result, num_resumed=num_resumed, started=started)


def _asked_loggers(config: TrainConfig) -> list[MetricsLogger]:
    if not (config.use_tensorboard or config.use_wandb or config.loggers):
        return []
    from lightrft.reporting.trackers import asked_loggers  # most runs have none

    return asked_loggers(config)


def _nothing_left(config: RunControlOptions, summary: Mapping[str, object]) -> RunSummary:
    """Return the summary that the complete run of this command left."""
    values = {each.name: summary.get(each.name) for each in fields(RunSummary)}
    values |= {"output_dir": config.output_dir, "model_dir": str(config.model_dir)}
    if os.environ.get("RANK", "0") == "0":
        print_on_first_rank(
            None,
            f"{config.output_dir} is complete after {values['num_steps']} steps: nothing is left "
            "to do",
        )
    return RunSummary(**values)  # type: ignore[arg-type]


@contextmanager
def _memory_noted(config: BuildOptions, planned_bytes: Mapping[str, float]) -> Iterator[None]:
    """Add planned and measured memory, and options to lower it, to an out-of-memory error."""
    try:
        yield
    except Exception as error:
        name = planned_phase(phase_of(error) or "")
        if name and (isinstance(error, MemoryError) or "memory" in str(error).lower()):
            planned = planned_bytes.get(name)
            text = "not planned" if planned is None else f"planned {planned / 1e9:.3g} GB"
            error.add_note(
                f"{PEAK_NOTE}{text}, measured {peak_bytes() / 1e9:.3g} GB at the peak of {name}"
                + _budget_text(config) * (name in ("train", "score"))
            )
        raise


def _budget_text(config: BuildOptions) -> str:
    tokens = config.micro_batch_tokens
    if tokens is None:
        return f", micro_train_batch_size = {config.micro_train_batch_size}"
    return f", micro_batch_tokens = {tokens}: give --micro_batch_tokens {max(1, tokens // 2)}"


def _ready(config: TrainConfig, strategy: StrategyBase, **known: object) -> TrainConfig:
    """Return the configuration with all decisions of the machine; collective.

    Args:
        config, strategy: Options of the run, and its ranks.
        known: Values for start hooks, by name.
    """
    inputs = cast("StageInputs", known["inputs"])
    config = choose_threads(inputs.decided(config, strategy.backend), strategy.context)
    for name in START_HOOKS:
        hook = cast("Callable[..., TrainConfig]", START_HOOKS.load(name))
        asked = {n: known[n] for n in known if n in keyword_options(hook)}
        config = hook(config, strategy, **asked)
    return config.replaced({"ckpt_path": str(config.checkpoint_dir)})


def _default_rate(config: BuildOptions, stage: str) -> dict[str, object]:
    """Return the learning rate of the stage if none is set."""
    if config.actor_learning_rate is not None:
        return {}
    return {"actor_learning_rate": default_learning_rate(stage, has_adapters=config.lora_rank > 0)}


def open_console(config: OutputOptions, stack: ExitStack) -> RunConsole:
    """Return the console of the run until the stack is closed; it prints this process's lines."""
    console = RunConsole(
        every=config.logging_steps,
        heartbeat_seconds=config.heartbeat_seconds,
        is_verbose=config.verbose,
    )
    stack.callback(console.close)
    stack.enter_context(console_sink(console.tell))
    return console


def _open_folder(config: TrainConfig, plan: RunPlan, notes: Sequence[str]) -> None:
    """Move the files of a run without checkpoint aside, and keep the options of a new one.

    Print some notes, then which files of the former run are damaged.
    """
    folder = Path(config.output_dir)
    for text in (*notes, *(f"warning: {text}" for text in plan.warnings)):
        print_on_first_rank(None, text)
    if plan.restarts:
        aside = set_aside(folder, config.checkpoint_dir)
        print_on_first_rank(
            None,
            f"{folder} held a run that ended before its first checkpoint: its files are in "
            f"{aside}; starting over",
        )
    if not plan.resumes:
        # Before anything can fail; a continued run keeps its options until it goes on.
        config.save(folder / CONFIG_FILE)


def finish_run(
    config: LearningOptions,
    loop: Loop[object],
    result: LoopResult,
    *,
    num_resumed: int,
    started: float,
) -> RunSummary:
    """Write the models and the summary of a run that reached its end or an alarm; collective.

    Raises:
        RunStoppedError: It was asked to stop.
        RunAlarmError: An alarm ended it.
    """
    strategy = loop.strategy
    if result.was_stopped:
        strategy.finish_saving()
        end_run(config, strategy.context, "stopped", result.num_steps)
        raise RunStoppedError(result.num_steps, config.output_dir)
    loop.save_model(config.model_dir)
    loop.save_model(Path(config.output_dir) / EMA_FOLDER, is_average=True)
    strategy.finish_saving()
    with phase("prove the saved model", 60 * config.timeout_minutes):
        loop.stage.prove_saved(config.model_dir)
    summary = _summarise(config, loop, result, num_resumed, started)
    if strategy.is_rank_0():
        folder = Path(config.output_dir)
        start = read_json(folder / START_FILE)
        named = {name: str(start.get(name, "")) for name in ("run_sha256", "stage")}
        write_model_run(config.model_dir, folder, **named)
        write_whole(folder / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")
    end_run(config, strategy.context, "finished", result.num_steps)
    strategy.print(summary.verdict)
    if result.alarms:
        raise RunAlarmError(
            f"stop_on_alarm ended the run after step {result.num_steps}: "
            f"{'; '.join(result.alarms)}; model and checkpoint are in {config.output_dir}, "
            "--load_checkpoint continues"
        )
    return summary


def _summarise(
    config: RunControlOptions,
    loop: Loop[object],
    result: LoopResult,
    num_resumed: int,
    started: float,
) -> RunSummary:
    strategy, lines = loop.strategy, JsonLines(Path(config.output_dir) / METRICS_FILE)
    verdict = run_verdict(_numbers(entry) for step, entry in lines if step > 0)
    return RunSummary(
        output_dir=config.output_dir,
        model_dir=str(config.model_dir),
        num_resumed_steps=num_resumed,
        world_size=strategy.world_size,
        strategy=type(strategy).__name__,
        engine=strategy.inference_engine_type or "",
        seconds=time.perf_counter() - started,
        first_eval=result.first_eval or _first_eval(lines),
        last_eval=result.last_eval,
        last_metrics=result.last_metrics,
        num_steps=result.num_steps,
        alarms=result.alarms,
        memory=memory_peaks(strategy.context.planned_bytes, (entry for _, entry in lines)),
        verdict="; ".join([verdict, *(f"ended by an alarm: {text}" for text in result.alarms)]),
    )


def _first_eval(lines: Iterable[tuple[int, Mapping[str, object]]]) -> dict[str, float]:
    """Return the evaluation before the first step, recorded by another process of the run."""
    entry = next((entry for step, entry in lines if step == 0), {})
    known = _numbers(entry).items()
    return {name: value for name, value in known if name != "step" and value is not None}


def _numbers(entry: Mapping[str, object]) -> dict[str, float | None]:
    """Return the metrics of a line of metrics.jsonl; null is a number that was not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in entry.items()
        if value is None or isinstance(value, int | float)
    }
