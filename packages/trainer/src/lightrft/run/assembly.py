"""A whole run from one configuration: data, rewards, strategy, models, engine, trainer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.toml import write_whole
from lightrft.datasets import Prompt, PromptDataset, collate_prompts, load_prompts
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.prompt_stream import planned_steps
from lightrft.datasets.prompts import load_texts
from lightrft.datasets.render import PromptTokenizer
from lightrft.models import load_tokenizer
from lightrft.reporting.console import RunConsole
from lightrft.reporting.files import (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TRAJECTORIES_FILE,
    JsonLines,
    set_aside,
)
from lightrft.reporting.loggers import JsonLinesLogger, MetricsLogger, own_loggers
from lightrft.reporting.rank_log import rank_log
from lightrft.reporting.trackers import build_trackers
from lightrft.reporting.trajectories import SampleLog, TrajectoryLog
from lightrft.rewards import CombinedReward
from lightrft.rewards.recipes import RewardRecipes
from lightrft.rollout.environments.environments import Environments
from lightrft.run.alarms import RunAlarmError, run_verdict
from lightrft.run.models import (
    build_model_rewards,
    build_models,
    build_run_reward,
    reward_recipes,
)
from lightrft.run.resume import RunPlan, plan_run
from lightrft.run.start import end_run, sole_writer, start_run
from lightrft.run.stopping import RunStoppedError
from lightrft.run.threads import choose_threads
from lightrft.run.vision import load_vision
from lightrft.stages.algorithm import algorithm_problems
from lightrft.stages.construction import decide_by_machine, read_model_facts
from lightrft.stages.pretrain_mix import PretrainMix
from lightrft.strategy import get_strategy
from lightrft.strategy.distributed.console_sink import console_sink
from lightrft.strategy.distributed.context import print_on_first_rank
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.tools.plan.start_check import check_budget
from lightrft.trainer.spmd_ppo_trainer import LoopResult, SPMDPPOTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

EMA_FOLDER = "model_ema"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run ended with; written to `summary.json`.

    Args:
        output_dir, model_dir: Where the results are.
        num_steps: Completed steps, those before a resume included.
        num_resumed_steps: Steps that a checkpoint brought along.
        world_size: Processes.
        strategy, engine: Names of the backend and of the rollout engine.
        seconds: Duration of this process's part, evaluations included.
        first_eval, last_eval: Metrics of the first and the last evaluation; {} without eval_data.
        last_metrics: Metrics of the last step.
        verdict: "learned: ..." or "no update: ...", see `run_verdict`; then, what ended the run
            before its last step.
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


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What is read and checked before any process group or model exists."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    eval_prompts: tuple[Prompt, ...]
    reward: CombinedReward
    environments: Environments | None = None
    pretrain: PretrainMix | None = None
    recipes: RewardRecipes | None = None
    vision: VisionPrompts | None = None

    @property
    def saved_text(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What is saved beside a model: its processor, or its tokenizer."""
        return self.tokenizer if self.vision is None else self.vision.encoder.processor


def run_training(
    config: TrainConfig,
    *,
    loggers: Sequence[MetricsLogger] = (),
    stop_request: Callable[[], bool] | None = None,
) -> RunSummary:
    """Trains as one process of a run, whose rank is in the environment.

    Everything a user can get wrong is checked first. The folder `config.output_dir` gets
    config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/, model/ and summary.json.

    Args:
        config: What to do.
        loggers: Further receivers of metrics on the first rank.
        stop_request: Says whether this process was asked to stop; all ranks then stop together.

    Raises:
        RunStoppedError: The run was asked to stop; it can be continued.
        RunAlarmError: An alarm ended the run; all its files are written.
        ConfigError: Options that cannot be run, or a used folder that they would spoil.
        DataError: Prompts that cannot be read.
        RewardError: A reward function that cannot be loaded, or that fails.
        ModelLoadError: A model or tokenizer that cannot be read.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        plan = plan_run(config)
        config = config.replaced(plan.kept)
        inputs = read_inputs(config)
        stack.callback(inputs.reward.close)
        if inputs.environments is not None:
            stack.callback(inputs.environments.close)
        folder, rank = Path(config.output_dir), int(os.environ.get("RANK", "0"))
        console: RunConsole | None = None
        if rank == 0:
            stack.enter_context(sole_writer(folder))
            console = _open_console(config, stack)
            _open_folder(config, plan)
        stack.enter_context(rank_log(folder, rank))
        if rank == 0:
            loggers = (*build_trackers(config), *own_loggers(config), *loggers)
        strategy = stack.enter_context(get_strategy(config))
        facts = read_model_facts(config, strategy)
        strategy.check_model_size(facts.num_weights)
        config = decide_by_machine(config, strategy, facts=facts)
        config = choose_threads(config, strategy)
        config = check_budget(config, strategy)
        trainer, loader = build_trainer(config, inputs, strategy, loggers=loggers, console=console)
        stack.callback(trainer.close)
        num_resumed = start_run(config, trainer, plan)
        if console is not None:
            console.continue_after(num_resumed)
        result = trainer.fit(prompts_dataloader=loader, stop_request=stop_request)
        if result.was_stopped:
            strategy.finish_saving()
            end_run(config, strategy, "stopped", result.num_steps)
            raise RunStoppedError(result.num_steps, config.output_dir)
        _save_models(config, strategy, trainer, inputs)
        summary = _summarise(config, strategy, result, num_resumed, started)
        if strategy.is_rank_0():
            text = json.dumps(asdict(summary), indent=2) + "\n"
            write_whole(Path(config.output_dir) / SUMMARY_FILE, text)
        end_run(config, strategy, "finished", result.num_steps)
        strategy.print(summary.verdict)
        if result.alarms:
            raise RunAlarmError(
                f"stop_on_alarm ended the run after step {result.num_steps}: "
                f"{'; '.join(result.alarms)}; model and checkpoint are in {config.output_dir}, "
                "--load_checkpoint continues"
            )
        return summary


def _open_console(config: TrainConfig, stack: ExitStack) -> RunConsole:
    """What shows the run until the stack is closed; all lines of this process go there."""
    console = RunConsole(
        every=config.logging_steps,
        heartbeat_seconds=config.heartbeat_seconds,
        is_verbose=config.verbose,
    )
    stack.callback(console.close)
    stack.enter_context(console_sink(console.tell))
    return console


def _open_folder(config: TrainConfig, plan: RunPlan) -> None:
    """Moves the files of a run without checkpoint aside, and keeps the options of a new one."""
    folder = Path(config.output_dir)
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


def _save_models(
    config: TrainConfig, strategy: StrategyBase, trainer: SPMDPPOTrainer, inputs: RunInputs
) -> None:
    strategy.save_model(trainer.actor, inputs.saved_text, str(config.model_dir))
    if trainer.ema_model is not None:
        folder = Path(config.output_dir) / EMA_FOLDER
        strategy.save_model(trainer.ema_model, inputs.saved_text, str(folder))
    strategy.finish_saving()


def read_inputs(config: TrainConfig) -> RunInputs:
    """Checks the options, then reads tokenizer, data and rewards."""
    _check_options(config)
    tokenizer = load_tokenizer(str(config.pretrain), chat_template=config.chat_template)
    vision = load_vision(config)
    environments = build_environments(config, tokenizer, vision)
    shown = (vision or tokenizer) if environments is None else environments.prompt_tokenizer
    prompts = load_run_prompts(config, shown)
    if len(prompts) < config.rollout_batch_size:
        raise ConfigError(
            f"{config.prompt_data} has {len(prompts)} usable prompts, less than one step takes: "
            f"lower rollout_batch_size (got {config.rollout_batch_size}) or give more prompts"
        )
    eval_prompts: tuple[Prompt, ...] = ()
    if config.eval_data is not None:
        eval_prompts = load_run_prompts(config, shown, for_evaluation=True).prompts
    recipes = reward_recipes(config, (*prompts.prompts, *eval_prompts))
    reward = build_run_reward(config, recipes=recipes)
    return RunInputs(
        tokenizer,
        prompts,
        eval_prompts,
        reward,
        environments,
        pretrain_mix(config, tokenizer),
        recipes,
        vision,
    )


def build_environments(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionPrompts | None = None,
    *,
    has_journal: bool = True,
) -> Environments | None:
    """What answers the calls of the model, or None without `environment` and `tools`."""
    if not config.has_episodes:
        return None
    return Environments(
        config,
        tokenizer,
        has_system=config.system_prompt is not None,
        folder=Path(config.output_dir) if has_journal else None,
        modality=vision,
    )


def pretrain_mix(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainMix | None:
    """The texts of `pretrain_data`, or None without."""
    if config.pretrain_data is None or config.ptx_coef == 0:
        return None
    texts = load_texts(
        config.pretrain_data,
        tokenizer,
        text_key=config.pretrain_column,
        max_tokens=config.prompt_max_len + config.generate_max_len,
        end_token_id=tokenizer.eos_token_id,
    )
    batch_size = config.ptx_batch_size or config.train_batch_size
    return PretrainMix(texts, config.ptx_coef, batch_size, config.seed)


def build_trainer(
    config: TrainConfig,
    inputs: RunInputs,
    strategy: StrategyBase,
    *,
    loggers: Sequence[MetricsLogger] = (),
    console: RunConsole | None = None,
) -> tuple[SPMDPPOTrainer, DataLoader[Prompt]]:
    """Models, engine, trainer and the loader of this rank's prompts."""
    loader = strategy.setup_dataloader(
        inputs.prompts, config.rollout_batch_size // strategy.world_size, collate_fn=collate_prompts
    )
    num_steps = planned_steps(loader, config, strategy.world_size)
    strategy.print(inputs.prompts.report.summary())
    for note in () if inputs.environments is None else inputs.environments.notes:
        strategy.print(note)
    warn_without_end(inputs.tokenizer, config, strategy.print)
    strategy.print(f"{num_steps} steps of {config.rollout_batch_size} prompts")
    if console is not None:
        console.plan(num_steps)
    with phase("load the models", timedelta(minutes=config.timeout_minutes)):
        models = build_models(config, strategy, num_steps * config.steps_per_rollout)
    strategy.setup_inference_engine(config, config.engine_type, actor=models.actor)
    folder = Path(config.output_dir)
    trainer = SPMDPPOTrainer(
        strategy,
        models.actor,
        models.critic,
        inputs.reward,
        models.reference,
        models.average,
        processor=None if inputs.vision is None else inputs.vision.encoder.processor,
        tokenizer=inputs.tokenizer,
        eval_prompts=inputs.eval_prompts,
        loggers=(
            *(() if console is None else (console,)),
            *((JsonLinesLogger(folder / METRICS_FILE),) if strategy.is_rank_0() else ()),
            *loggers,
        ),
        sample_log=SampleLog(folder / SAMPLES_FILE),
        trajectory_log=trajectory_log(config),
        pretrain=inputs.pretrain,
        environments=inputs.environments,
        model_rewards=build_model_rewards(
            config,
            strategy,
            models.reward_models,
            tokenizer=inputs.tokenizer,
            recipes=inputs.recipes,
        ),
        ckpt_path=str(config.checkpoint_dir),
        fused_linear_logprob=config.fused_linear_logprob,
    )
    return trainer, loader


def warn_without_end(
    tokenizer: PreTrainedTokenizerBase, config: TrainConfig, write: Callable[[str], None]
) -> None:
    """Writes a line if the tokenizer has no token at which a response could end."""
    if tokenizer.eos_token_id is None:
        write(
            f"warning: the tokenizer of {config.pretrain} has no end-of-sequence token: responses "
            f"end only at generate_max_len = {config.generate_max_len} tokens, unless the model's "
            "generation_config.json names another end"
        )


def trajectory_log(config: TrainConfig) -> TrajectoryLog | None:
    """The log of single tokens, or None."""
    if not config.save_trajectories:
        return None
    return TrajectoryLog(
        Path(config.output_dir) / TRAJECTORIES_FILE,
        num_samples=config.num_trajectories_to_save,
        every=config.trajectory_steps or max(1, config.save_steps),
    )


def load_run_prompts(
    config: TrainConfig, tokenizer: PromptTokenizer, *, for_evaluation: bool = False
) -> PromptDataset:
    """The prompts of `prompt_data`, or those of `eval_data`.

    Raises:
        DataError: They cannot be read.
    """
    if for_evaluation:
        return load_prompts(
            str(config.eval_data),
            tokenizer,
            config,
            max_samples=config.max_eval_samples,
            split=config.eval_split,
        )
    return load_prompts(
        str(config.prompt_data),
        tokenizer,
        config,
        max_samples=config.max_samples,
        split=config.prompt_split,
        probabilities=config.prompt_data_probs,
    )


def _check_options(config: TrainConfig) -> None:
    """Raises a ConfigError that lists all that is missing or does not fit."""
    missing = [
        f"--{name} is missing"
        for name, value in (("pretrain", config.pretrain), ("prompt_data", config.prompt_data))
        if value is None
    ]
    if missing:
        raise ConfigError("\n".join(missing))
    config.check_world_size(int(os.environ.get("WORLD_SIZE", "1")))
    problems = algorithm_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _summarise(
    config: TrainConfig,
    strategy: StrategyBase,
    result: LoopResult,
    num_resumed: int,
    started: float,
) -> RunSummary:
    lines = JsonLines(Path(config.output_dir) / METRICS_FILE)
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
        verdict="; ".join([verdict, *(f"ended by an alarm: {text}" for text in result.alarms)]),
    )


def _first_eval(lines: Iterable[tuple[int, Mapping[str, object]]]) -> dict[str, float]:
    """The evaluation before the first step, which another process of the run wrote down."""
    entry = next((entry for step, entry in lines if step == 0), {})
    known = {name: value for name, value in _numbers(entry).items() if name != "step"}
    return {name: value for name, value in known.items() if value is not None}


def _numbers(entry: Mapping[str, object]) -> dict[str, float | None]:
    """The metrics of a line of metrics.jsonl; null is a number that was not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in entry.items()
        if value is None or isinstance(value, int | float)
    }
