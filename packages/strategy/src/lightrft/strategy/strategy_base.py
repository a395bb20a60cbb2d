"""The whole interface of a training strategy; its parts do the work."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from lightrft.config import ConfigError, StrategyConfig
from lightrft.engines.types import EngineStatus
from lightrft.strategy.backend import (
    NO_ENGINE,
    AnyModel,
    Arguments,
    Backend,
    ModelOptimPair,
    ModelOrModelOptimPair,
    PreparedModel,
    RewardModels,
    WantedState,
    inner_module,
    is_actor,
    is_engine,
    wrapped_module,
)
from lightrft.strategy.checkpoints.checkpoints import Checkpoints
from lightrft.strategy.checkpoints.folders import SaveRequest
from lightrft.strategy.distributed import collectives
from lightrft.strategy.distributed.collectives import ALONE, Group
from lightrft.strategy.distributed.context import (
    DistributedContext,
    MemoryReport,
    print_on_first_rank,
    report_memory,
    seed_generators,
    synchronize_and_free,
)
from lightrft.strategy.distributed.sequence_parallel import SPDataProcessor
from lightrft.strategy.model_training import ModelTraining
from lightrft.strategy.optimizers import OptimizerStepResult
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    vocabulary_of,
)

if TYPE_CHECKING:
    from lightrft.engines.base import RolloutEngine
    from lightrft.engines.types import Completion, Vocabulary
    from lightrft.strategy.engine.generation import GenLenAnalyser, PromptItem
    from lightrft.strategy.engine.session import EngineSession, OnFinished
    from lightrft.strategy.weight_sync.sync import WeightSync, WeightSyncReport

__all__ = [
    "EngineStatus",
    "ModelOptimPair",
    "ModelOrModelOptimPair",
    "PreparedModel",
    "StrategyBase",
    "is_actor",
    "is_engine",
]

T = TypeVar("T")


class StrategyBase:
    """Training over ranks, and the rollout engine that shares the processes.

    Its parts are a `DistributedContext` (ranks, groups, collectives), a `Backend` (FSDP2,
    DeepSpeed or plain torch: models), `ModelTraining` (optimizers and their steps), `Checkpoints`
    and an `EngineSession` (engine, generation, weight sync). Code that needs one part takes that.
    As a context manager it closes itself.

    Args:
        seed: Seed of all random number generators.
        max_norm: Global gradient norm above which gradients are scaled down; 0 never clips.
        micro_train_batch_size: Samples per rank in one forward and backward pass.
        train_batch_size: Samples per optimizer step over all ranks.
        args: Further settings, kept unchanged; read through `config`.
        backend: Training backend.
        overrides: Values that replace those of `args`; None keeps an option of `args`.

    Raises:
        ValueError: Sizes do not divide; the message has the numbers.
        RuntimeError: Some of the launcher's environment variables are missing.

    Attributes:
        context, backend, training, checkpoints, session: The parts.
    """

    # Ranks that train together: all of them, or `ALONE`.
    world_group: ClassVar[Group] = None

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
        *,
        backend: Callable[[DistributedContext, StrategyConfig], Backend],
        **overrides: bool | int | None,
    ) -> None:
        self.args = args
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        config = self.config = dataclasses.replace(
            StrategyConfig.from_args(args),
            seed=seed,
            max_norm=max_norm,
            micro_train_batch_size=micro_train_batch_size,
            train_batch_size=train_batch_size,
        )
        for name, value in overrides.items():
            if value is not None:
                setattr(config, name, value)
        idle = config.unused_options()
        if idle and config.strict:
            raise ConfigError("options without effect (strict):\n  " + "\n  ".join(idle))
        self.adam_offload = config.adam_offload
        self.zpg = config.zpg
        self.grad_accum_dtype = config.grad_accum_dtype
        self.overlap_comm = config.overlap_comm
        self.time_steps: defaultdict[str, int] = defaultdict(int)
        self.context = DistributedContext(config, self.world_group)
        self.backend = backend(self.context, config)
        self.training = ModelTraining(self.backend, self._mark_stale)
        self.num_skipped_steps = self.training.num_skipped_steps
        self.setup_distributed(timeout=self.context.timeout)
        for text in idle:
            self.print(f"warning: option without effect: {text}")
        self.checkpoints = Checkpoints(
            self.training, type(self).__name__, in_background=config.async_save
        )
        # Collective, so it is read here; its first use may come on any rank.
        self._rollout_context = self.context.beside()
        self._session: EngineSession | None = None
        self.sp_data_processor = SPDataProcessor(ALONE if self.sp_group is None else self.sp_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish saving, close the engine, and end the process group if started here.

        Idempotent.

        Raises:
            CheckpointError: A save in the background failed; everything is closed all the same.
        """
        try:
            self.checkpoints.saver.close()
        finally:
            if self._session is not None:
                self._session.close()
            self.context.close(self.backend.stop)

    # --- ranks

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Seed, choose the device, start the process group, check sizes. Idempotent.

        Args:
            timeout: Deadline of the start and of every collective.
            num_gpu_per_node: GPUs per node, for the local rank without LOCAL_RANK; None detects.

        Raises:
            RuntimeError: RANK or WORLD_SIZE is missing; the message names it.
            ValueError: Batch sizes or `sp_size` do not fit the number of ranks, or group sizes
                were changed after the groups had been formed.
        """
        context, config = self.context, self.config
        context.start(timeout, num_gpu_per_node)
        self.backend.start()
        self.device, self.world_size = context.device, context.world_size
        self.accumulated_gradient = self.training.accumulated_gradient
        context.form_groups()
        self.sp_mesh_device = context.sp_mesh
        self.sp_group, self.dp_group = context.sp_group, context.dp_group
        self.engine_mp_group = context.engine_mp_group
        self.engine_dp_group = context.engine_dp_group
        self.engine_type = config.engine_type

    def set_seed(self, seed: int) -> None:
        """Seed random, NumPy and torch (CPU and all GPUs) with the same value on every rank."""
        seed_generators(seed)

    @classmethod
    def is_rank_0(cls) -> bool:
        """Return whether this is the first of all ranks."""
        return collectives.group_rank(cls.world_group) == 0

    def get_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return self.context.rank

    @classmethod
    def print(cls, *msg: object) -> None:
        """Print with a time stamp, on rank 0 only."""
        print_on_first_rank(cls.world_group, *msg)

    @classmethod
    def report_memory(cls, prefix: str = "") -> MemoryReport:
        """Print (on rank 0) and return the memory in use; on a CPU that of the process."""
        return report_memory(cls.world_group, prefix)

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Wait for the GPU, then for all ranks, then free cached GPU memory."""
        synchronize_and_free(cls.world_group)

    def barrier(self) -> None:
        """Wait until every rank arrived."""
        self.context.barrier()

    @overload
    def all_reduce(self, data: int, op: str = "mean") -> float: ...

    @overload
    def all_reduce(self, data: T, op: str = "mean") -> T: ...

    def all_reduce(self, data: object, op: str = "mean") -> object:
        """Reduce a tensor, a number or a nested dict; see `DistributedContext.all_reduce`."""
        return self.context.all_reduce(data, op)

    @overload
    def all_gather(self, data: Tensor | float) -> Tensor: ...

    @overload
    def all_gather(self, data: Mapping[str, collectives.Tree]) -> dict[str, Tensor]: ...

    def all_gather(self, data: collectives.Tree) -> object:
        """Concatenate every rank's values in rank order; see `DistributedContext.all_gather`."""
        return cast("object", self.context.all_gather(data))

    def gather_objects(self, item: T, group: ProcessGroup | None = None) -> list[T]:
        """Return every rank's plain Python object, by rank, on every rank of the group."""
        return self.context.gather_objects(item, group)

    # --- models

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Place (and shard) one model.

        Args:
            model: Bare model, or an actor or critic around one.
            is_training: Whether gradients will be needed.
            shard_size: Ranks over which parameters are sharded; -1 is all of them, or with FSDP2
                `fsdp_shard_size`. Values above the number of ranks are clamped.
            reshard_after_forward: Whether full parameters are freed after the forward pass.

        Raises:
            ValueError: The number of ranks is not a multiple of `shard_size`.
        """
        return self.backend.prepare_model(
            model, is_training=is_training, shard_size=shard_size, reshard=reshard_after_forward
        )

    def prepare(self, *models_or_model_optim_pairs: object, is_rlhf: bool = False) -> object:
        """Prepare models, each according to its form.

        A triple (model, optimizer, scheduler) becomes a PreparedModel and a pair a pair, ready for
        training. A list becomes a list of models for inference, a model one such model. None and a
        triple of None stay.

        Args:
            *models_or_model_optim_pairs: Models in these forms.
            is_rlhf: Whether reward models in a list are sharded over at most 8 ranks.

        Returns:
            List in the order of the arguments; for one argument its result alone.
        """
        items = models_or_model_optim_pairs
        done = [self.training.prepare(item, is_rlhf=is_rlhf) for item in items]
        return done[0] if len(done) == 1 else done

    def unwrap_model(self, model: AnyModel) -> nn.Module:
        """Return the actor, critic or bare model inside the strategy's wrapper."""
        return inner_module(model)

    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
        """Create the optimizer of a model.

        Args:
            model: Model, PreparedModel or wrapper.
            **kwargs: `lr`, `betas`, `eps`, `weight_decay`; defaults from the configuration.
        """
        return self.training.create_optimizer(model, **kwargs)

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: RewardModels,
        initial_model: nn.Module | None,
        args: Arguments | None,
        max_steps: int,
        *,
        frozen_steps: int = 0,
    ) -> tuple[PreparedModel, PreparedModel, RewardModels, nn.Module | None]:
        """Prepare all models of a run, with optimizers and schedules for actor and critic.

        Args:
            actor: Actor; it gets the mark `is_actor = True`.
            critic: Critic; None for critic-free algorithms, which have no optimizer for it. A
                module is trained whether or not `critic_pretrain` names its checkpoint: a critic
                built by the caller has none.
            reward_models: One, several or none; left alone with `remote_rm_url`.
            initial_model: The reference model, or None.
            args: Not needed; the strategy's configuration counts.
            max_steps: Optimizer steps of the run; the schedule ends there.
            frozen_steps: First steps, which the actor does not take.

        Returns:
            (actor, critic, reward_models, initial_model), the first two as PreparedModel.
        """
        del args
        ready = self.training.prepare_models(
            actor, critic, max_steps=max_steps, frozen_steps=frozen_steps
        )
        if initial_model is not None:
            initial_model = self.prepare_model(initial_model)
        if not self.config.remote_rm_url and reward_models is not None:
            if isinstance(reward_models, nn.Module):
                reward_models = self.prepare_model(reward_models, shard_size=8)
            else:
                reward_models = [self.prepare_model(rm, shard_size=8) for rm in reward_models]
        self.sync_and_clear_cache()
        return *ready, reward_models, initial_model

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Arguments | None = None, max_steps: int = int(1e8)
    ) -> PreparedModel:
        """Prepare a reward model for training at `actor_learning_rate`.

        Args:
            reward_model: Model to prepare.
            args: Settings that replace the strategy's.
            max_steps: Optimizer steps of the run.
        """
        config = None if args is None else StrategyConfig.from_args(args)
        return self.training.prepare_reward_model(reward_model, max_steps, config)

    def setup_dataloader(
        self,
        replay_buffer: Dataset[T],
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[T]], object] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[T]:
        """Return a loader of this rank's share of the data.

        Args:
            replay_buffer: Map-style data set, equal on all ranks.
            batch_size: Samples per batch of this rank.
            pin_memory, shuffle, collate_fn, drop_last: As in torch's DataLoader; `drop_last` also
                drops samples that do not divide evenly among ranks.
            sampler: Replacement of the DistributedSampler.
            consumed_samples: Samples of the epoch already used, over all ranks.
        """
        if sampler is None:
            from lightrft.strategy.sampler import DistributedSampler

            sampler = DistributedSampler(
                replay_buffer,
                num_replicas=self.world_size,
                rank=self.get_rank(),
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            # Every iterator draws a seed, and a resumed run makes one iterator more. So the seed
            # must not come from the generator that checkpoints restore.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def init_model_context(self, meta_init: bool | None = False) -> AbstractContextManager[None]:
        """Return the context in which models are built. Report memory.

        With `meta_init` and FSDP2 their parameters get no memory yet. `prepare_model` shards them
        first, then reads this rank's rows from the directory in the model's configuration, so no
        rank ever holds a whole model.
        """
        return self.backend.init_model_context(meta_init)

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Move optimizer states to the CPU (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        self.backend.offload_optimizer(optimizer)
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | None = None
    ) -> Optimizer:
        """Move optimizer states back (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        self.backend.load_optimizer(optimizer, device)
        return optimizer

    def offload_model(self, model: AnyModel) -> nn.Module:
        """Move an idle model to the CPU; a DeepSpeed engine stays."""
        return self.backend.move_model(model, torch.device("cpu"))

    def reload_model(self, model: AnyModel) -> nn.Module:
        """Move a model back to this rank's device."""
        return self.backend.move_model(model, self.device)

    def moving_average(self, model: AnyModel, model_ema: AnyModel, beta: float = 0.992) -> None:
        """Set ema <- beta * ema + (1 - beta) * model, for every parameter; call it once per step.

        Averages are kept in float32, shard by shard.

        Args:
            model: Trained model.
            model_ema: Average, prepared the same way as the model.
            beta: Weight of the past, in [0, 1].

        Raises:
            ValueError: The two have other parameters or shards, or `beta` is out of range.
        """
        self.training.moving_average(model, model_ema, beta)

    # --- training

    def backward(
        self, loss: Tensor, model: AnyModel, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: Mean loss of the micro-batch, divided here by `accumulated_gradient`; inside
                `accumulation`, its share of the batch loss, multiplied here by the number of ranks
                over which gradients are averaged.
            model: Model or PreparedModel.
            optimizer: Optimizer of the model.
        """
        _refuse_options(kwargs, "backward")
        self.training.backward(loss, model, optimizer)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: AnyModel,
        scheduler: LRScheduler | None,
        name: str = "model",
        **kwargs: object,
    ) -> OptimizerStepResult | None:
        """Count a micro-batch; on the last of a step clip, update and schedule.

        If the gradients of any rank are not finite, all ranks skip the update and the schedule,
        clear the gradients and count it in `num_skipped_steps[name]`.

        Returns:
            Result of the step; None while accumulating.
        """
        _refuse_options(kwargs, "optimizer_step")
        return self.training.optimizer_step(optimizer, model, scheduler, name)

    def require_finite(self, model: AnyModel) -> None:
        """Check every trained parameter. Collective.

        Raises:
            NonFiniteError: A parameter has an infinity or NaN on some rank; raised on all ranks.
        """
        self.training.require_finite(model)

    def accumulation(
        self, num_micro_batches: int, optimizer: Optimizer
    ) -> AbstractContextManager[None]:
        """Return a context of one step: `num_micro_batches` pairs of `backward`, `optimizer_step`.

        Inside, `loss` is a micro-batch's share of the batch loss (its terms over the batch's
        global normalizer), so that micro-batches of any size add up to the batch loss.

        Args:
            num_micro_batches: Micro-batches of the step, equal on all ranks.
            optimizer: Optimizer of the step.

        Raises:
            ValueError: Ranks announce different numbers, or a number below 1 (on every rank).
            RuntimeError: Left before all micro-batches came, or entered in mid-step.
        """
        return self.training.accumulation(num_micro_batches, optimizer)

    # --- files

    def save_ckpt(
        self,
        model: AnyModel,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        model_ema: AnyModel | None = None,
    ) -> None:
        """Write a checkpoint, then remove old ones that this run wrote.

        With `async_save` it returns when the state has been copied to host memory.

        Args:
            model: Model or PreparedModel. Its optimizer and schedule are remembered.
            save_dir: Folder of all checkpoints.
            tag: Name of this one; None takes the next `global_step{n}`.
            max_num: Checkpoints to keep.
            max_mem: Megabytes that all kept checkpoints may take.
            client_state: Plain values (JSON) and tensors to store beside the model.
            save_latest: Whether loading without a tag may choose this one.
            optimizer, scheduler: Objects to store instead of the remembered ones.
            model_ema: Moving average of the model, stored with it.

        Raises:
            CheckpointError: Saving failed on some rank, or the last save in the background did.
        """
        request = SaveRequest(
            save_dir=Path(save_dir),
            tag=tag,
            max_num=max_num,
            max_mem=max_mem,
            client_state=client_state or {},
            save_latest=save_latest,
        )
        self.checkpoints.save(
            request, self.training.resolve(model, optimizer, scheduler), model_ema
        )

    def load_ckpt(
        self,
        model: AnyModel,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        model_ema: AnyModel | None = None,
    ) -> tuple[str, dict[str, object]]:
        """Read a checkpoint into the model, its optimizer and its schedule.

        Args:
            model: Model or PreparedModel.
            load_dir: Folder of all checkpoints.
            tag: Wanted tag; None takes the latest complete one.
            load_module_strict: Whether missing or unexpected weights are errors.
            load_optimizer_states, load_lr_scheduler_states: Whether to read these, too.
            load_module_only: Read only weights, regardless of the other options.
            optimizer, scheduler: Objects to read into instead of the remembered ones.
            model_ema: Model that gets the moving average stored with the model.

        Returns:
            (path of the checkpoint, client_state).

        Raises:
            FileNotFoundError: There is no checkpoint.
            CheckpointError: None is whole, or it is of another kind of strategy, model or world.
        """
        prepared = self.training.resolve(model, optimizer, scheduler)
        reads_all = not load_module_only
        wanted = WantedState(
            strict=load_module_strict,
            optimizer=reads_all and load_optimizer_states and prepared.optimizer is not None,
            scheduler=reads_all and load_lr_scheduler_states and prepared.scheduler is not None,
            rng=reads_all,
        )
        return self.checkpoints.load(Path(load_dir), tag, prepared, wanted, model_ema)

    def finish_saving(self) -> None:
        """Wait until every checkpoint is complete. Collective; `close` calls it, too.

        Raises:
            CheckpointError: A save in the background failed; the message names rank and error.
        """
        self.checkpoints.finish()

    def save_model(self, model: AnyModel, tokenizer: object | None, output_dir: str) -> None:
        """Write the model in Hugging Face format (full weights, config, tokenizer)."""
        self.checkpoints.export(model, tokenizer, Path(output_dir))

    def load_model(self, model: AnyModel, path: str, strict: bool = True) -> None:
        """Read full weights in safetensors format into a prepared or bare model."""
        self.training.load_weights(model, Path(path), strict=strict)

    # --- rollout engine

    @property
    def session(self) -> EngineSession:
        """The rollout engine, its generation and its weight sync."""
        if self._session is None:
            # Stages that only train on rows have no engine, and import none of its code.
            from lightrft.strategy.engine.session import EngineSession

            self._session = EngineSession(self.context, self._rollout_context, self.config)
        return self._session

    def _mark_stale(self, is_load: bool) -> None:
        if self._session is not None:
            self._session.mark_stale(is_load)

    @property
    def genlen_analyser(self) -> GenLenAnalyser:
        """Collector of generation lengths."""
        return self.session.genlen_analyser

    @property
    def _profile_step(self) -> int:
        """Calls of `gather_and_generate` so far."""
        return 0 if self._session is None else self._session.num_calls

    @property
    def inference_engine(self) -> RolloutEngine | None:
        """The rollout engine, or None before `setup_inference_engine`."""
        return None if self._session is None else self._session.engine

    @inference_engine.setter
    def inference_engine(self, engine: RolloutEngine | None) -> None:
        self.session.engine = engine

    @property
    def vllm_engine(self) -> RolloutEngine | None:
        """The engine under its name for vLLM; `inference_engine.native` is the `vllm.LLM`."""
        return self.inference_engine

    @property
    def vllm_mp_group(self) -> ProcessGroup | None:
        """`engine_mp_group`: the ranks that share this rank's engine."""
        return self.engine_mp_group

    @property
    def inference_engine_type(self) -> str | None:
        """The engine's registry name."""
        return None if self.inference_engine is None else self.inference_engine.name

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Asleep or awake; SLEEPED without an engine."""
        return EngineStatus.SLEEPED if self._session is None else self._session.status

    @property
    def broadcast_manager(self) -> WeightSync | None:
        """Sender of the actor's weights to the engine; None before the first update."""
        return None if self._session is None else self._session.weight_sync

    @property
    def last_weight_sync(self) -> WeightSyncReport | None:
        """Report of the last `update_engine_weights`."""
        return None if self._session is None else self._session.last_weight_sync

    def setup_inference_engine(
        self,
        args: Arguments | None,
        engine_type: str = "vllm",
        actor: AnyModel | None = None,
        *,
        vocabulary: Vocabulary | None = None,
    ) -> RolloutEngine:
        """Start the rollout engine; afterwards it sleeps if sleeping is enabled.

        An earlier engine is closed first: two would not fit beside the model.

        Args:
            args: Settings of the engine; None takes the strategy's.
            engine_type: "vllm", "sglang", "hf" or "auto"; the only one from here on.
            actor: Actor whose weights are sent at once, or None.
            vocabulary: Tokens that are sampled and that end completions; None takes the actor's.

        Raises:
            ValueError: Unknown `engine_type`, no model is known, or `lora_sync` is adapter and
                the actor has none or is missing.
        """
        config = self.config
        if args is not None and args is not self.args:
            config = StrategyConfig.from_args(args)
        inner = None if actor is None else inner_module(actor)
        vocabulary = vocabulary or vocabulary_of(inner)
        read = None if actor is None else partial(self.parameter_source, actor)
        engine = self.session.start(config, engine_type, inner, vocabulary, read)
        self.engine_type = self.config.engine_type
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()
        return engine

    def maybe_sleep_inference_engine(self) -> None:
        """Put the engine to sleep if there is one, sleeping is enabled and it is awake."""
        if self._session is not None:
            self._session.sleep(level=1)

    def sleep_until_weight_sync(self) -> None:
        """Put the engine to sleep until `update_engine_weights`, which must be its next use.

        The engine drops its weights instead of copying them to the host (sleep level 2); it
        refuses to generate until they have been sent again.
        """
        if self._session is not None:
            self._session.sleep(level=2)

    def wakeup_inference_engine(self) -> None:
        """Free the trainer's cached memory, then wake the engine if it sleeps."""
        if self._session is not None:
            self._session.wake_up()

    def engine_generate_local(
        self,
        sampling_params: object,
        prompt_token_ids: Sequence[PromptItem] | Sequence[int] | None = None,
        multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Completion]:
        """Generate on this rank's engine without gathering prompts.

        Args:
            sampling_params: `SamplingParams`, a mapping of its fields, or the engine's object.
            prompt_token_ids: Token ids per prompt; a flat list of ids is one prompt.
            multi_modal_inputs: Items `{"prompt": text, "multi_modal_data": {"image": [...],
                "video": [...]}}`.

        Returns:
            Completions, prompt-major.

        Raises:
            ValueError: Neither or both inputs were passed.
            NotImplementedError: There is no engine.
        """
        if prompt_token_ids is None and multi_modal_inputs is None:
            raise ValueError("Either prompt_token_ids or multi_modal_inputs must be provided.")
        if prompt_token_ids is not None and multi_modal_inputs is not None:
            raise ValueError(
                "Both prompt_token_ids and multi_modal_inputs can not be provided at the same time."
            )
        if self.inference_engine is None:
            raise NotImplementedError(NO_ENGINE)
        from lightrft.strategy.engine import generation  # see `session`

        params = generation.as_sampling_params(sampling_params, self.inference_engine)
        if multi_modal_inputs is not None:
            requests = generation.multimodal_requests(multi_modal_inputs, 0)
        else:
            requests = generation.text_requests(generation.as_prompts(prompt_token_ids or ()), 0)
        return self.session.generate_local(requests, params)

    @classmethod
    def _build_multimodal_inputs(
        cls,
        all_prompts: Sequence[str],
        all_images: Sequence[object] | None,
        images_num: Sequence[int] | None,
        all_videos: Sequence[object] | None,
        videos_num: Sequence[int] | None,
    ) -> list[dict[str, object]]:
        """Pair prompts with images and videos; see `generation.build_multimodal_inputs`."""
        from lightrft.strategy.engine import generation  # see `session`

        return generation.build_multimodal_inputs(
            all_prompts,
            images=all_images,
            images_num=images_num,
            videos=all_videos,
            videos_num=videos_num,
        )

    def gather_and_generate(
        self,
        sampling_params: object,
        all_prompt_token_ids: Sequence[PromptItem] | None = None,
        all_prompts: Sequence[str] | None = None,
        all_images: Sequence[object] | None = None,
        sleep_engine: bool = True,
        images_num: Sequence[int] | None = None,
        all_videos: Sequence[object] | None = None,
        videos_num: Sequence[int] | None = None,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """Generate for the prompts of all ranks; each rank gets the completions of its prompts.

        Collective: every rank must call it, with lists that may differ in length and may be empty.
        Prompts are gathered within the group of ranks that share an engine. The engine is woken
        before and, with `sleep_engine`, put to sleep after, also if generation fails.

        Args:
            sampling_params: `SamplingParams`, a mapping of its fields, or the engine's object.
            all_prompt_token_ids: Token ids (or `GenerationRequest`s), one per prompt.
            all_prompts: Prompts as text; needed with images or videos.
            all_images, all_videos: Nested (a list per prompt) or flat (cut by the counts).
            sleep_engine: Whether to put the engine to sleep afterwards (if enabled).
            images_num, videos_num: Media per prompt; inferred if None.
            on_finished: Function to call with this rank's completions as they end, if the engine
                streams and each rank has it at hand; must not raise. It may miss some completions.

        Returns:
            This rank's completions, prompt-major: `n` consecutive ones for each prompt.

        Raises:
            NotImplementedError: There is no engine.
            ValueError, TypeError: This rank's arguments are wrong.
            RuntimeError: Another rank failed; the message names it. All ranks raise.
        """
        from lightrft.strategy.engine.generation import PromptBatch  # see `session`

        batch = PromptBatch(
            all_prompt_token_ids, all_prompts, all_images, images_num, all_videos, videos_num
        )
        return self.session.gather_and_generate(
            batch, sampling_params, on_finished, sleep_engine=sleep_engine
        )

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Return this rank's shards of a model's parameters, by checkpoint names, for syncs."""
        return self.backend.parameter_source(model)

    def update_engine_weights(self, actor: AnyModel) -> WeightSyncReport | None:
        """Send the actor's weights to the engine, which is awake afterwards.

        Returns:
            Report of the sync (also kept as `last_weight_sync`); None without an engine.

        Raises:
            RuntimeError: The engine does not hold the actor's weights; the message names them.
        """
        if self.inference_engine is None:
            self.print("Skip update engine weights since inference engine is not initialized.")
            return None
        return self.session.update_weights(wrapped_module(actor), self.parameter_source(actor))


def _refuse_options(kwargs: Mapping[str, object], method: str) -> None:
    if kwargs:
        raise TypeError(f"{method} got unknown options: {', '.join(sorted(kwargs))}")
