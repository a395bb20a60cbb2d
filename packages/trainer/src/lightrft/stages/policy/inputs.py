"""Inputs of a policy stage: read and checked first, then built with models and engine."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM

from lightrft.algorithms.interface import advantage_traits
from lightrft.config import ConfigError, OrderOptions, OutputOptions, RateOptions, TrainConfig
from lightrft.config.options import options_of
from lightrft.config.train_config import PolicyOptions
from lightrft.datasets import Prompt, PromptDataset, load_prompts
from lightrft.datasets.batch_stream import planned_steps
from lightrft.datasets.media import Modality
from lightrft.datasets.prompt_sampler import RowChoice, SampledRows, build_sampler, probabilities_of
from lightrft.datasets.types import DataError
from lightrft.engines.media.text_encoder import TEXT_ENCODER
from lightrft.engines.text import Tokenizer
from lightrft.models import Actor, load_tokenizer
from lightrft.models.statements import Statements, read_statements
from lightrft.reporting.files import (
    DRAWS_FILE,
    ROLLOUTS_FILE,
    SAMPLES_FILE,
    TRAJECTORIES_FILE,
)
from lightrft.reporting.trajectories import DrawLog, SampleLog, ShownSamples, TrajectoryLog
from lightrft.rewards import CombinedReward
from lightrft.rewards.types import RewardRecipes
from lightrft.rollout.sampler import SingleTurns
from lightrft.stages.models import (
    FrozenModels,
    configure_trained,
    load_policy,
    load_teachers,
    place_frozen,
    prove_models,
    require_equal_start,
    trained_model,
)
from lightrft.stages.policy.algorithm import algorithm_problems, build_estimator
from lightrft.stages.policy.maker import SampleLogs
from lightrft.stages.policy.policy_stage import PolicyData, PolicyStage, RolloutParts
from lightrft.stages.policy.rewards import (
    build_model_rewards,
    build_run_reward,
    build_trainer_rewards,
    prepare_reward_models,
    reward_recipes,
    tokenizers_of_scorers,
)
from lightrft.stages.stage import TrainedModels
from lightrft.stages.start_checks import (
    check_parts,
    decide_by_files,
    load_modality,
    prompts_within_context,
    shared_prompts,
)
from lightrft.strategy.backend import Backend
from lightrft.strategy.distributed.context import DistributedContext, print_on_first_rank
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_groups import LaunchEnvironment
from lightrft.strategy.model_training import ModelTraining
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightrft.experience.teachers import TeacherRows
    from lightrft.models import Critic
    from lightrft.reporting.rollouts import RolloutLog
    from lightrft.rollout.agents.agents import Agents
    from lightrft.rollout.environments.environments import Environments
    from lightrft.stages.policy.pretrain_mix import PretrainMix


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Data, rewards and environments of a run; see `StageInputs`."""

    tokenizer: PreTrainedTokenizerBase
    statements: Statements
    prompts: PromptDataset
    choice: RowChoice
    eval_prompts: tuple[Prompt, ...]
    reward: CombinedReward
    modality: Modality
    environments: Agents | Environments | SingleTurns
    pretrain: PretrainMix | None = None
    recipes: RewardRecipes | None = None
    teacher_rows: TeacherRows | None = None

    def decided(self, config: TrainConfig, backend: Backend) -> TrainConfig:
        """Return the configuration with the machine's choices made.

        Raises:
            ConfigError: The strategy cannot hold a model of this size.
        """
        count = config.steps_per_rollout
        updates = f"{count} update{'s' if count > 1 else ''} per rollout"
        method = f"{config.advantage_estimator}, {config.policy_loss_name} loss, {updates}"
        return decide_by_files(config, backend, method=method)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> PolicyStage:
        """Build models, engine and data of the stage."""
        loader = self.loader(config, strategy.context)
        num_steps = planned_steps(loader, config, strategy.world_size)
        strategy.print(self.prompts.report.summary())
        for note in self.environments.notes:
            strategy.print(note)
        self.statements.say(strategy.print)
        held_out = [_task_key(prompt) for prompt in self.eval_prompts]
        for line in shared_prompts(map(_task_key, self.prompts.prompts), held_out, "prompts"):
            strategy.print(line)
        strategy.print(f"{num_steps} steps of {config.rollout_batch_size} prompts")
        with phase("load the models", timedelta(minutes=config.timeout_minutes)):
            models, frozen = build_models(
                config, strategy.training, num_steps * config.steps_per_rollout
            )
            reward_models = prepare_reward_models(config, strategy.backend)
            # Proofs come first: an engine is compared with these models next.
            each = (*(trained.model for trained in models.trained), *frozen.all)
            kept, has_media = PolicyStage.kept_dropout, any(p.media for p in self.prompts.prompts)
            encoder = self.modality.encoder if has_media else TEXT_ENCODER
            config = prove_models(config, strategy.context, each, kept=kept, encoder=encoder)
        if strategy.inference_engine is None:
            strategy.setup_inference_engine(config, config.engine_type, actor=models.main.model)
        else:  # the engine of other ranks, which run the environments
            self.environments.close()
            strategy.update_engine_weights(models.main.model)
        model_rewards = build_model_rewards(
            config, strategy.backend, reward_models, tokenizer=self.tokenizer, recipes=self.recipes
        )
        reward, model_rewards = build_trainer_rewards(
            self.reward, model_rewards, strategy.backend, config
        )
        processor = self.modality.processor
        stage = PolicyStage(
            config,
            strategy,
            models,
            frozen,
            parts=RolloutParts(
                reward,
                self.tokenizer,
                model_rewards,
                self.environments,
                processor,
                has_rewards=config.has_rewards,
            ),
            data=PolicyData(loader, self.eval_prompts, self.pretrain, self.teacher_rows),
            logs=self.sample_logs(config, config.rollout_ranks, has_rewards=config.has_rewards),
        )
        stage.text_part = self.tokenizer if processor is None else processor
        return stage

    def loader(self, config: OrderOptions, context: DistributedContext) -> SampledRows[Prompt]:
        """Return the prompts with their sampler, for the ranks that sample."""
        return SampledRows(self.prompts.prompts, config, self.choice, context)

    def sample_logs(
        self, config: OutputOptions, rollout_ranks: int, *, has_rewards: bool
    ) -> SampleLogs:
        """Return the logs of a training rank; ranks that only generate write the samples."""
        trajectories = trajectory_log(config, has_rewards=has_rewards)
        shown = ShownSamples(
            partial(print_on_first_rank, None),
            every=config.sample_steps,
            has_rewards=has_rewards,
        )
        draws = DrawLog(Path(config.output_dir) / DRAWS_FILE, len(self.prompts))
        if rollout_ranks:
            return SampleLogs(trajectories=trajectories, shown=shown, draws=draws)
        path = Path(config.output_dir) / SAMPLES_FILE
        samples = SampleLog(path, has_rewards=has_rewards)
        rollouts = self.rollout_log(config, has_rewards=has_rewards)
        return SampleLogs(samples, trajectories, rollouts, shown, draws)

    def rollout_log(self, config: OutputOptions, *, has_rewards: bool) -> RolloutLog | None:
        """Return the log of all samples, or None."""
        if not config.save_rollouts:
            return None
        held_out = (prompt.key for prompt in self.eval_prompts)
        path = Path(config.output_dir) / ROLLOUTS_FILE
        from lightrft.reporting.rollouts import RolloutLog

        return RolloutLog(
            path,
            held_out=held_out,
            has_rewards=has_rewards,
            has_texts=config.save_rollout_texts,
        )

    def media_digests(self) -> Iterator[bytes]:
        """Return the hashes of the prompts' media."""
        prompts = (self.prompts[index] for index in range(len(self.prompts)))
        return (each.digest.encode() for prompt in prompts for each in prompt.media)

    def items(self) -> tuple[()]:
        """Return (): samples are generated, not read."""
        return ()

    def close(self) -> None:
        """End environments and rewards."""
        try:
            self.environments.close()
        finally:
            self.reward.close()


def read_inputs(config: TrainConfig) -> PolicyInputs:
    """Check the options, then read tokenizer, data and rewards.

    Raises:
        DataError: Prompts that cannot be read.
        RewardError: A reward function that cannot be loaded.
        ModelLoadError: A tokenizer or processor that cannot be read.
        ConfigError: Options that cannot be run.
    """
    _check_options(config)
    check_parts(config, AutoModelForCausalLM)
    tokenizer = load_tokenizer(str(config.pretrain), config)
    statements = read_statements(str(config.pretrain), config, tokenizer=tokenizer)
    statements.require_consistent()
    tokenizers_of_scorers(config, tokenizer)  # refused before the models are loaded
    modality = load_modality(config, tokenizer)
    environments = build_environments(config, tokenizer, modality)
    shown = environments.prompt_tokenizer
    prompts = load_run_prompts(config, shown)
    if len(prompts) < config.rollout_batch_size:
        raise ConfigError(
            f"{config.prompt_data} has {len(prompts)} usable prompts, less than one step takes: "
            f"lower rollout_batch_size (got {config.rollout_batch_size}) or give more prompts"
        )
    choice = row_choice(prompts, config)
    if config.keeps_rows:
        _require_json(prompts.prompts)
    if config.has_agent:
        require_images(prompts.prompts)
    teacher_rows = None
    if config.teacher_places:
        from lightrft.experience.maker import SEES_TEXTS
        from lightrft.experience.teachers import TeacherRows
        from lightrft.stages.teachers import prove_teachers

        if any(prompt.media for prompt in prompts.prompts):
            raise ConfigError(SEES_TEXTS)
        teacher_rows = TeacherRows.of_run(prompts.prompts, config)
        prove_teachers(config, tokenizer, [prompt.token_ids for prompt in prompts.prompts[:64]])
    eval_prompts: tuple[Prompt, ...] = ()
    if config.eval_data is not None:
        eval_prompts = load_run_prompts(config, shown, for_evaluation=True).prompts
    recipes = reward_recipes(config, (*prompts.prompts, *eval_prompts))
    reward = build_run_reward(config, recipes=recipes)
    return PolicyInputs(
        tokenizer,
        statements,
        prompts,
        choice,
        eval_prompts,
        reward,
        modality,
        environments,
        pretrain_mix(config, tokenizer),
        recipes,
        teacher_rows,
    )


def row_choice(prompts: PromptDataset, config: PolicyOptions) -> RowChoice:
    """Return what a prompt sampler knows of the prompts; refuse a sampler that cannot be built."""
    choice = RowChoice(
        len(prompts),
        config.seed,
        config.rollout_batch_size,
        has_rewards=config.has_rewards,
        needs_probabilities=config.prompt_importance,
        weights=probabilities_of(prompts.weights, config),
        rates=prompts.rates,
        columns=[prompt.columns for prompt in prompts.prompts],
    )
    build_sampler(config, choice)
    return choice


def _task_key(prompt: Prompt) -> Hashable:
    """Return a key of the task: prompt and, for episodes, the columns that a reset reads."""
    return prompt.key, hash(repr(prompt.row))


def require_images(prompts: Iterable[Prompt]) -> None:
    """Raise a DataError if a prompt has media that agents cannot see."""
    for prompt in prompts:
        others = [kind for kind in prompt.media.kinds if kind != "image"]
        if others:
            raise DataError(
                f"row {prompt.id + 1} of the prompts: agents are shown images alone, and it has "
                f"{' and '.join(others)}: leave the row out"
            )


def _require_json(prompts: Iterable[Prompt]) -> None:
    """Raise a DataError if a prompt cannot be kept in a checkpoint."""
    for prompt in prompts:
        try:
            json.dumps([prompt.columns, prompt.row])
        except TypeError as error:
            raise DataError(
                f"row {prompt.id + 1} of the prompts: rollout_lag and stream_chunk keep rows in "
                f"checkpoints as JSON: {error}; convert that column to text"
            ) from error


def build_environments(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    modality: Modality,
    *,
    has_journal: bool = True,
) -> Agents | Environments | SingleTurns:
    """Return the environments that answer the model's calls; without any, single turns."""
    if not config.has_episodes:
        return SingleTurns(modality)
    folder = Path(config.output_dir) if has_journal else None
    config = config.replaced(prompts_within_context(config))
    if config.has_agent:
        from lightrft.rollout.agents.agents import Agents

        return Agents(config, tokenizer, folder=folder, modality=modality)
    from lightrft.rollout.environments.environments import Environments

    return Environments(
        config,
        tokenizer,
        has_system=config.system_prompt is not None,
        folder=folder,
        modality=modality,
    )


def pretrain_mix(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainMix | None:
    """Return the rows of `pretrain_data`; None if it is not used."""
    if config.pretrain_data is None or config.ptx_coef == 0:
        return None
    from lightrft.stages.policy.pretrain_mix import PretrainMix, load_mixed_rows

    bounded = config.replaced(prompts_within_context(config))
    texts = load_mixed_rows(config.pretrain_data, tokenizer, bounded)
    batch_size = config.ptx_batch_size or config.train_batch_size
    return PretrainMix(texts, config.ptx_coef, batch_size, config.seed)


def trajectory_log(config: OutputOptions, *, has_rewards: bool) -> TrajectoryLog | None:
    """Return the log of single tokens, or None."""
    if not config.save_trajectories:
        return None
    return TrajectoryLog(
        Path(config.output_dir) / TRAJECTORIES_FILE,
        num_samples=config.num_trajectories_to_save,
        every=config.trajectory_steps or max(1, config.save_steps),
        has_rewards=has_rewards,
    )


def load_run_prompts(
    config: TrainConfig, tokenizer: Tokenizer, *, for_evaluation: bool = False
) -> PromptDataset:
    """Return the prompts of `prompt_data`, or those of `eval_data`.

    Raises:
        DataError: They cannot be read.
        ConfigError: The model's context has no room for a response.
    """
    path, max_samples, split, shares = (
        (config.eval_data, config.max_eval_samples, config.eval_split, ())
        if for_evaluation
        else (config.prompt_data, config.max_samples, config.prompt_split, config.prompt_data_probs)
    )
    changes = prompts_within_context(config)
    if for_evaluation:  # teachers read no held-out prompts, and each is evaluated once
        changes["teacher_prompt_column"] = None
        of_order = {**options_of(OrderOptions), **options_of(RateOptions)}
        changes |= {name: entry.default for name, (entry, _) in of_order.items()}
    config = config.replaced(changes)
    return load_prompts(
        str(path), tokenizer, config, max_samples=max_samples, split=split, probabilities=shares
    )


def _check_options(config: TrainConfig) -> None:
    """Raise a ConfigError that lists all missing and unfitting options."""
    missing = config.missing_inputs
    if missing:
        raise ConfigError("\n".join(missing))
    config.check_world_size(LaunchEnvironment.read().world_size)
    problems = algorithm_problems(config)
    problems += config.refused_options("train")
    if config.distillation_stage != "policy":
        problems.append(
            f"teacher_form {config.teacher_form} is of the rows of lightrft distill: leave it out"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def build_models(
    config: TrainConfig, training: ModelTraining, max_steps: int
) -> tuple[TrainedModels, FrozenModels]:
    """Load and prepare actor, critic, the actor's moving average, and the frozen models.

    Args:
        config: Paths and options of the models.
        training: Strategy part that prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    path, backend = str(config.pretrain), training.backend
    critic: Critic | None = None
    with backend.init_model_context(config.meta_init):
        actor = load_policy(path, config)
        if advantage_traits(build_estimator(config)).needs_critic:
            from lightrft.models import Critic

            critic_path = config.critic_pretrain
            critic = Critic.from_pretrained(
                critic_path if isinstance(critic_path, str) else path,
                allow_new_weights=config.allow_new_weights,
            )
    # Must precede the strategy's wrapping and compiling.
    for trained in (actor, critic):
        if trained is not None:
            configure_trained(trained, config, training.context, balances=config.aux_loss_coef > 0)
    ready_actor, ready_critic = training.prepare_models(
        actor, critic, max_steps=max_steps, frozen_steps=config.num_frozen_updates
    )
    ready = [trained_model("actor", ready_actor)]
    if critic is not None:
        ready.append(trained_model("critic", ready_critic))
    del actor, critic
    reference = None
    if config.init_kl_coef > 0:
        read = partial(Actor.from_pretrained, path, allow_new_weights=config.allow_new_weights)
        if config.quantize:  # alike, and new adapters add nothing
            read = partial(load_policy, path, config.replaced({"lora_path": None}))
        reference = place_frozen(read, config, backend)
        require_equal_start(backend, ready_actor, reference)
    teachers = load_teachers(config.teacher_folders, config, backend)
    average = None
    if config.enable_ema:
        with backend.init_model_context(config.meta_init):
            copied = load_policy(path, config)
        average = backend.prepare_model(copied)
    return TrainedModels(tuple(ready), average), FrozenModels(reference, teachers)
