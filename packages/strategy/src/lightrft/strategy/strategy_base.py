"""The interface every training strategy implements, and what all of them share."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
import weakref
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightrft.engines.base import RolloutEngine
from lightrft.engines.types import Completion, EngineStatus
from lightrft.strategy import distributed, engine_session, multimodal, process_groups
from lightrft.strategy.accumulation import AccumulationState
from lightrft.strategy.config import ConfigError, StrategyConfig
from lightrft.strategy.deadlines import phase
from lightrft.strategy.distributed import ALONE, Group
from lightrft.strategy.engine_session import EngineSession, PromptBatch, PromptItem
from lightrft.strategy.memory import MemoryReport, measure_memory
from lightrft.strategy.optimizers import OptimizerStepResult, learning_rate_schedule
from lightrft.strategy.parameter_source import checkpoint_module
from lightrft.strategy.sampler import DistributedSampler
from lightrft.strategy.sequence_parallel import SPDataProcessor
from lightrft.strategy.statistics import GenLenAnalyser

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset, Sampler

    from lightrft.strategy.parameter_source import ParameterSource
    from lightrft.strategy.weight_sync import WeightSyncReport

__all__ = [
    "EngineStatus",
    "ModelOptimPair",
    "ModelOrModelOptimPair",
    "PreparedModel",
    "StrategyBase",
    "is_actor",
    "is_engine",
]


class PreparedModel(NamedTuple):
    """A model ready for training, with its optimizer and schedule; None means "no such model"."""

    model: nn.Module | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None


ModelOptimPair = tuple[nn.Module, Optimizer]
ModelOrModelOptimPair = nn.Module | ModelOptimPair
Arguments = Namespace | Mapping[str, object] | StrategyConfig
RewardModels = nn.Module | Sequence[nn.Module] | None
NO_MODEL = PreparedModel(None, None, None)


@runtime_checkable
class _Wrapper(Protocol):
    """DistributedDataParallel, a DeepSpeed engine and the like."""

    module: nn.Module


def is_actor(model: object) -> bool:
    """Whether the model is marked as an actor (`is_actor = True`)."""
    return bool(getattr(model, "is_actor", False))


def is_engine(model: object) -> bool:
    """Whether the object is a rollout engine."""
    return isinstance(model, RolloutEngine)


class StrategyBase(ABC):
    """How models are trained over ranks, and the rollout engine that shares the processes.

    Args:
        seed: Seed of all random number generators.
        max_norm: Global gradient norm above which gradients are scaled down; 0 never clips.
        micro_train_batch_size: Samples per rank in one forward and backward pass.
        train_batch_size: Samples per optimizer step over all ranks.
        args: Further settings; kept as given, and read through `config`.

    Raises:
        ValueError: Sizes do not divide; the message has the numbers.
        RuntimeError: The launcher's environment variables are missing.
    """

    wraps_before_optimizer = False
    """Whether a model must be wrapped before its optimizer is created (sharded parameters)."""

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.args = args
        self.config = dataclasses.replace(
            StrategyConfig.from_args(args),
            seed=seed,
            max_norm=max_norm,
            micro_train_batch_size=micro_train_batch_size,
            train_batch_size=train_batch_size,
        )
        self.adam_offload = self.config.adam_offload
        self.zpg = self.config.zpg
        self.grad_accum_dtype = self.config.grad_accum_dtype
        self.overlap_comm = self.config.overlap_comm
        self.inference_engine_type: str | None = None
        self.broadcast_manager: object | None = None
        self.last_weight_sync: WeightSyncReport | None = None
        self.time_steps: defaultdict[str, int] = defaultdict(int)
        self.num_skipped_steps: defaultdict[str, int] = defaultdict(int)
        self._profile_step = 0
        self._accumulations: weakref.WeakKeyDictionary[Optimizer, AccumulationState] = (
            weakref.WeakKeyDictionary()
        )
        self._trained: weakref.WeakKeyDictionary[
            nn.Module, tuple[Optimizer | None, LRScheduler | None]
        ] = weakref.WeakKeyDictionary()
        self._owns_process_group = False
        self.sp_mesh_device: DeviceMesh | None = None
        self.sp_group: ProcessGroup | None = None
        self._check_options()
        self.setup_distributed(timeout=self._timeout)
        self.engine_mp_group, self.engine_dp_group = self._create_engine_groups()
        self._session = EngineSession(
            group=self._group_or_alone(self.engine_mp_group),
            world=self.world_group,
            free_memory=self.sync_and_clear_cache,
        )
        self.sp_data_processor = SPDataProcessor(self._group_or_alone(self.sp_group))
        self.genlen_analyser = GenLenAnalyser(
            plot_every=self.config.plot_every, log_dir=self.config.log_dir, group=self.world_group
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ processes

    @property
    def _timeout(self) -> timedelta:
        return timedelta(minutes=self.config.timeout_minutes)

    @property
    def world_group(self) -> Group:
        """The group of all ranks this strategy trains on."""
        return None

    @property
    def num_averaging_ranks(self) -> int:
        """Ranks over which this backend averages gradients."""
        return self.world_size

    def _group_or_alone(self, group: ProcessGroup | None) -> Group:
        return ALONE if group is None else group

    def _check_options(self) -> None:
        """Names options without effect once, at the start."""
        idle = self.config.ineffective_options()
        if idle and self.config.strict:
            raise ConfigError("options without effect (strict):\n  " + "\n  ".join(idle))
        self._idle_options = idle

    def set_seed(self, seed: int) -> None:
        """Seeds random, NumPy and torch (CPU and all GPUs) with the same value on every rank."""
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - user code may use the global generator
        torch.manual_seed(seed)

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Seeds, chooses the device, starts the process group, checks sizes. Idempotent.

        Args:
            timeout: Deadline of the start and of every collective.
            num_gpu_per_node: To derive the local rank where LOCAL_RANK is not set; None detects.

        Raises:
            RuntimeError: RANK or WORLD_SIZE is missing; the message names it.
            ValueError: Batch sizes or `sp_size` do not fit the number of ranks.
        """
        self.set_seed(self.seed)
        self.engine_type = self.config.engine_type
        gpus = torch.cuda.device_count() if num_gpu_per_node is None else num_gpu_per_node
        self.config.local_rank = process_groups.resolve_local_rank(self.config.local_rank, gpus)
        self.device = process_groups.resolve_device(self.config.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._owns_process_group |= self._start_processes(timeout)
        self.world_size = distributed.group_size(self.world_group)
        process_groups.check_divides(self.world_size, "sp_size", self.config.sp_size)
        process_groups.check_divides(self.world_size, "engine_tp_size", self.config.engine_tp_size)
        self.accumulated_gradient = process_groups.accumulation_steps(
            train_batch_size=self.train_batch_size,
            micro_train_batch_size=self.micro_train_batch_size,
            num_data_ranks=self.world_size // self.config.sp_size,
            world_size=self.world_size,
        )
        if self.config.sp_size > 1 and self.sp_mesh_device is None:
            self._setup_sequence_parallel()
        for text in self._idle_options:
            self.print(f"warning: option without effect: {text}")
        self._idle_options = []

    def _start_processes(self, timeout: timedelta | None) -> bool:
        return process_groups.start_process_group(timeout)

    def _create_engine_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        return process_groups.create_sub_group(self.config.engine_tp_size, timeout=self._timeout)

    def _setup_sequence_parallel(self) -> None:
        shape = (self.world_size // self.config.sp_size, self.config.sp_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "sp"))
        self.sp_mesh_device = mesh
        self.sp_group = mesh["sp"].get_group()
        self.print(f"sequence parallelism: mesh dp x sp = {shape[0]} x {shape[1]}")

    def close(self) -> None:
        """Closes the engine and the process group if this strategy started it. Idempotent."""
        if self._session.engine is not None:
            self._session.engine.close()
            self._session.engine = None
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_process_group = False

    @classmethod
    def is_rank_0(cls) -> bool:
        """Whether this is the first of all ranks."""
        return distributed.group_rank() == 0

    def get_rank(self) -> int:
        """This rank among all ranks."""
        return distributed.group_rank(self.world_group)

    @classmethod
    def print(cls, *msg: object) -> None:
        """Prints with a time stamp, on rank 0 only."""
        if cls.is_rank_0():
            stamp = datetime.now().strftime("%m-%d %H:%M:%S")
            text = " ".join(str(part) for part in msg)
            sys.stdout.write(f"[StrategyINFO {stamp}]  {text}\n")
            sys.stdout.flush()

    @classmethod
    def report_memory(cls, prefix: str = "") -> MemoryReport:
        """Prints (on rank 0) and returns the memory in use; on a CPU that of the process."""
        report = measure_memory()
        if cls.is_rank_0():
            sys.stdout.write(f"MEMORY STATUS: {prefix}, {report}\n")
        return report

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Waits for the GPU, then for all ranks, then frees cached GPU memory."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cls._barrier_all()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @classmethod
    def _barrier_all(cls) -> None:
        distributed.barrier()

    def barrier(self) -> None:
        """Waits until every rank arrived."""
        distributed.barrier(self.world_group)

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, data: distributed.Tree, op: str = "mean") -> distributed.Tree:
        """Reduces a tensor, a number or a nested dict over all ranks in one collective.

        Args:
            data: Left unchanged.
            op: "mean", "max" or "sum".

        Returns:
            The same structure, type and device. Integers stay exact; a mean of integers is a
            float.

        Raises:
            AssertionError: `op` is none of these.
            ValueError: Ranks passed different keys, types or shapes (raised on every rank).
        """
        return distributed.all_reduce(data, op, group=self.world_group)

    def all_gather(self, data: distributed.Tree) -> distributed.Tree:
        """Concatenates every rank's values in rank order; a number gives a 1-D tensor.

        Raises:
            ValueError: Ranks passed different keys, types or trailing shapes (on every rank).
        """
        return distributed.all_gather(data, group=self.world_group)

    def gather_objects(
        self, item: distributed.T, group: ProcessGroup | None = None
    ) -> list[distributed.T]:
        """Every rank's plain Python object, by rank, on every rank of the group."""
        return distributed.gather_objects(item, self.world_group if group is None else group)

    # ------------------------------------------------------------------ training

    @abstractmethod
    def create_optimizer(self, model: nn.Module, **kwargs: object) -> Optimizer:
        """Creates the optimizer of a model.

        Args:
            model: The model, or a PreparedModel or wrapper of it.
            **kwargs: `lr`, `betas`, `eps`, `weight_decay`; defaults from the configuration.
        """

    @abstractmethod
    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Places (and shards) one model.

        Args:
            model: A bare model or an actor or critic around one.
            is_training: Whether gradients will be needed.
            shard_size: Ranks over which parameters are sharded; -1 is all of them. Values above
                the number of ranks are clamped.
            reshard_after_forward: Whether full parameters are freed after the forward pass.

        Raises:
            ValueError: The number of ranks is not a multiple of `shard_size`.
        """

    @abstractmethod
    def _prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Makes one model and its optimizer ready for `backward` and `optimizer_step`."""

    @abstractmethod
    def backward(
        self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Adds the gradients of one micro-batch.

        Args:
            loss: The micro-batch's mean loss, divided here by `accumulated_gradient`; inside
                `accumulation`, its share of the batch loss, multiplied here by the number of
                ranks over which gradients are averaged.
            model: The model or a PreparedModel.
            optimizer: Its optimizer.
        """

    @abstractmethod
    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None,
        name: str = "model",
        **kwargs: object,
    ) -> OptimizerStepResult | None:
        """Counts a micro-batch; on the last of a step clips, updates and schedules.

        If the gradients of any rank are not finite, all ranks skip the update and the schedule,
        clear the gradients and count it in `num_skipped_steps[name]`.

        Returns:
            None while accumulating.
        """

    @abstractmethod
    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        """Writes a checkpoint, then removes old ones that this run wrote.

        Args:
            model: The model or a PreparedModel. Its optimizer and schedule are remembered.
            save_dir: Folder of all checkpoints.
            tag: Name of this one; None takes the next `global_step{n}`.
            max_num: Checkpoints to keep.
            max_mem: Megabytes that all kept checkpoints may take.
            client_state: Plain values (JSON) and tensors to store beside the model.
            save_latest: Whether loading without a tag finds this one.
            optimizer, scheduler: To store instead of the remembered ones.
        """

    @abstractmethod
    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[str, dict[str, object]]:
        """Reads a checkpoint into the model, its optimizer and its schedule.

        Args:
            model: The model or a PreparedModel.
            load_dir: Folder of all checkpoints.
            tag: Which one; None takes the latest complete one.
            load_module_strict: Whether missing or unexpected weights are errors.
            load_optimizer_states, load_lr_scheduler_states: What else to read.
            load_module_only: Reads only weights, whatever the other options say.
            optimizer, scheduler: To read into instead of the remembered ones.

        Returns:
            (path of the checkpoint, client_state).

        Raises:
            FileNotFoundError: No complete checkpoint is there.
        """

    @abstractmethod
    def save_model(self, model: nn.Module, tokenizer: object | None, output_dir: str) -> None:
        """Writes the model in Hugging Face format (full weights, config, tokenizer)."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: str, strict: bool = True) -> None:
        """Reads full weights in safetensors format into a prepared or bare model."""

    @abstractmethod
    def parameter_source(self, model: nn.Module) -> ParameterSource:
        """This rank's shards of a model's parameters, in checkpoint names, for weight sync."""

    def accumulation_state(self, optimizer: Optimizer) -> AccumulationState:
        """How far this optimizer is inside its current step."""
        if optimizer not in self._accumulations:
            self._accumulations[optimizer] = AccumulationState(self.accumulated_gradient)
        return self._accumulations[optimizer]

    @contextmanager
    def accumulation(self, num_micro_batches: int, optimizer: Optimizer) -> Iterator[None]:
        """One optimizer step made of `num_micro_batches` pairs of `backward`, `optimizer_step`.

        Inside, `loss` is a micro-batch's share of the batch loss (its terms over the batch's
        global normalizer), so that micro-batches of any size add up to the batch loss.

        Args:
            num_micro_batches: Must be the same on all ranks.
            optimizer: Whose step it is.

        Raises:
            ValueError: Ranks announce different numbers, or a number below 1 (on every rank).
            RuntimeError: Left before all micro-batches came, or entered in mid-step.
        """
        counts = self.gather_objects(int(num_micro_batches))
        if min(counts) < 1 or min(counts) != max(counts):
            raise ValueError(
                f"num_micro_batches must be the same positive number on all ranks: got {counts}"
            )
        outer = self._accumulations.get(optimizer)
        if outer is not None and (outer.takes_shares or outer.num_done > 0):
            raise RuntimeError(
                f"accumulation entered in the middle of an optimizer step ({outer.num_done} of "
                f"{outer.num_micro_batches} micro-batches done)"
            )
        state = AccumulationState(num_micro_batches, takes_shares=True)
        self._accumulations[optimizer] = state
        try:
            yield
        finally:
            del self._accumulations[optimizer]
        # Reached only without an exception: one in flight must not be replaced by this one.
        if state.num_done != num_micro_batches:
            raise RuntimeError(
                f"accumulation left after {state.num_done} of {num_micro_batches} micro-batches: "
                "call backward and optimizer_step for each"
            )

    def prepare(
        self,
        *models_or_model_optim_pairs: object,
        is_rlhf: bool = False,
    ) -> object:
        """Makes models ready, each according to its form.

        A triple (model, optimizer, scheduler) becomes a PreparedModel and a pair a pair, ready for
        training; a list becomes a list of models for inference, a model one such model; None and
        a triple of None stay.

        Args:
            *models_or_model_optim_pairs: As above.
            is_rlhf: Reward models in a list are sharded over at most 8 ranks.

        Returns:
            A list in the order of the arguments; for one argument its result alone.
        """
        done = [self._prepare_one(item, is_rlhf=is_rlhf) for item in models_or_model_optim_pairs]
        return done[0] if len(done) == 1 else done

    def _prepare_one(self, item: object, *, is_rlhf: bool) -> object:
        if item is None:
            return None
        if isinstance(item, nn.Module):
            return self.prepare_model(item)
        if isinstance(item, tuple) and len(item) in (2, 3) and not isinstance(item[1], nn.Module):
            model, optimizer, scheduler = (*item, None)[:3]
            if model is None:
                return NO_MODEL
            ready = self._prepare_training(model, optimizer, scheduler)
            self._remember(ready)
            return ready if len(item) == 3 else (ready.model, ready.optimizer)
        if isinstance(item, list | tuple):
            size = 8 if is_rlhf else -1
            return [self.prepare_model(model, shard_size=size) for model in item]
        raise TypeError(
            "prepare takes models, (model, optimizer[, scheduler]) tuples and lists of models, got "
            f"{type(item).__name__}"
        )

    def _remember(self, ready: PreparedModel) -> None:
        """Keeps a model's optimizer and schedule for checkpoints, under every name it has."""
        if ready.model is not None:
            pair = (ready.optimizer, ready.scheduler)
            for module in {ready.model, self.unwrap_model(ready.model)}:
                self._trained[module] = pair

    def _resolve(
        self,
        model: nn.Module | PreparedModel,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> PreparedModel:
        """The model with its optimizer and schedule: given, its own, or the remembered ones."""
        if isinstance(model, PreparedModel):
            found = model
        else:
            found = PreparedModel(model, *self._trained.get(model, (None, None)))
        return PreparedModel(
            found.model, optimizer or found.optimizer, scheduler or found.scheduler
        )

    def _module(self, model: nn.Module | PreparedModel) -> nn.Module:
        """The callable (wrapped) module of a model or PreparedModel."""
        module = model.model if isinstance(model, PreparedModel) else model
        if module is None:
            raise ValueError("this PreparedModel has no model")
        return module

    def unwrap_model(self, model: nn.Module | PreparedModel) -> nn.Module:
        """The actor, critic or bare model inside whatever the strategy put around it."""
        module = self._module(model)
        return module.module if isinstance(module, _Wrapper) else module

    def _create_scheduler(
        self, optimizer: Optimizer, max_steps: int, config: StrategyConfig | None = None
    ) -> LRScheduler:
        config = config or self.config
        return learning_rate_schedule(
            config.lr_scheduler,
            optimizer,
            max_steps=max_steps,
            warmup_ratio=config.lr_warmup_ratio,
        )

    def _trainable(
        self, model: nn.Module, learning_rate: float, max_steps: int, config: StrategyConfig
    ) -> PreparedModel:
        """Optimizer and schedule, and the model wrapped at the moment that this backend needs."""
        if self.wraps_before_optimizer:
            model = self.prepare_model(model, is_training=True)
        optimizer = self.create_optimizer(
            model, lr=learning_rate, betas=config.adam_betas, weight_decay=config.l2
        )
        scheduler = self._create_scheduler(optimizer, max_steps, config)
        ready = PreparedModel(model, optimizer, scheduler)
        if self.wraps_before_optimizer:
            self._remember(ready)
            return ready
        return cast(PreparedModel, self.prepare(ready, is_rlhf=True))

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: RewardModels,
        initial_model: nn.Module | None,
        args: Arguments | None,
        max_steps: int,
    ) -> tuple[PreparedModel, PreparedModel, RewardModels, nn.Module | None]:
        """Makes all models of a run ready, with optimizers and schedules for actor and critic.

        Args:
            actor: Marked with `is_actor = True`.
            critic: None for critic-free algorithms.
            reward_models: One, several or none; left alone with `remote_rm_url`.
            initial_model: The reference model, or None.
            args: Not needed; the strategy's own configuration counts.
            max_steps: Optimizer steps of the run; the schedule ends there.

        Returns:
            (actor, critic, reward_models, initial_model), the first two as PreparedModel.
        """
        del args
        actor.is_actor = True  # type: ignore[assignment]
        config = self.config
        ready_actor = self._trainable(actor, config.actor_learning_rate, max_steps, config)
        ready_critic = NO_MODEL
        if critic is not None:
            ready_critic = self._trainable(critic, config.critic_learning_rate, max_steps, config)
        if initial_model is not None:
            initial_model = self.prepare_model(initial_model)
        if not config.remote_rm_url and reward_models is not None:
            if isinstance(reward_models, nn.Module):
                reward_models = self.prepare_model(reward_models, shard_size=8)
            else:
                reward_models = [self.prepare_model(rm, shard_size=8) for rm in reward_models]
        self.sync_and_clear_cache()
        return ready_actor, ready_critic, reward_models, initial_model

    def prepare_reward_model(
        self, reward_model: nn.Module, args: Arguments | None = None, max_steps: int = int(1e8)
    ) -> PreparedModel:
        """Makes a reward model ready for training at `actor_learning_rate`.

        Args:
            reward_model: The model.
            args: Settings that replace the strategy's own.
            max_steps: Optimizer steps of the run.
        """
        config = self.config if args is None else StrategyConfig.from_args(args)
        ready = self._trainable(reward_model, config.actor_learning_rate, max_steps, config)
        self.sync_and_clear_cache()
        return ready

    def setup_dataloader(
        self,
        replay_buffer: Dataset[distributed.T],
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[distributed.T]], object] | None = None,
        drop_last: bool = True,
        sampler: Sampler[int] | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[distributed.T]:
        """A loader of this rank's share of the data.

        Args:
            replay_buffer: Map-style data set, equal on all ranks.
            batch_size: Samples per batch of this rank.
            pin_memory, shuffle, collate_fn, drop_last: As in torch's DataLoader; `drop_last` also
                drops what does not divide evenly among ranks.
            sampler: Replaces the DistributedSampler.
            consumed_samples: Samples of the epoch already used, over all ranks.
        """
        if sampler is None:
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
        )

    # ------------------------------------------------------------------ memory aids

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Where models are built; with `meta_init` they get no memory yet. Reports memory."""
        try:
            if meta_init:
                with torch.device("meta"):
                    yield
            else:
                yield
        finally:
            self.report_memory("Finished init_model_context")

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Moves optimizer states to the CPU (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | None = None
    ) -> Optimizer:
        """Moves optimizer states back (FSDP2 with `adam_offload`; elsewhere a no-op)."""
        del device
        return optimizer

    def offload_model(self, model: nn.Module) -> nn.Module:
        """Moves an idle model to the CPU."""
        return self._module(model).to("cpu")

    def reload_model(self, model: nn.Module) -> nn.Module:
        """Moves a model back to this rank's device."""
        return self._module(model).to(self.device)

    @torch.no_grad()
    def moving_average(
        self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992, device: str = "cpu"
    ) -> None:
        """Ema <- beta * ema + (1 - beta) * model, for every parameter; call it once per step.

        Args:
            model: The trained model.
            model_ema: The average; prepared the same way as the model.
            beta: Weight of the past.
            device: Where the average lives.

        Raises:
            ValueError: The two models have different parameters.
        """
        source = dict(self.unwrap_model(model).named_parameters())
        target = dict(self.unwrap_model(model_ema).named_parameters())
        if source.keys() != target.keys():
            odd = sorted(source.keys() ^ target.keys())[:3]
            raise ValueError(f"model and average have different parameters, e.g. {odd}")
        for name, average in target.items():
            value = source[name].detach().to(average.device, average.dtype)
            average.data.lerp_(value, 1.0 - beta)
        del device

    # ------------------------------------------------------------------ inference engine

    @property
    def inference_engine(self) -> RolloutEngine | None:
        """The rollout engine, or None before `setup_inference_engine`."""
        return self._session.engine

    @inference_engine.setter
    def inference_engine(self, engine: RolloutEngine | None) -> None:
        self._session.engine = engine
        self.inference_engine_type = None if engine is None else engine.name

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Asleep or awake; SLEEPED without an engine."""
        return self._session.status

    def setup_inference_engine(
        self,
        args: Arguments | None,
        engine_type: str = "vllm",
        actor: nn.Module | None = None,
    ) -> RolloutEngine:
        """Starts the rollout engine; afterwards it sleeps if sleeping is enabled.

        Args:
            args: Settings of the engine; None takes the strategy's own.
            engine_type: "vllm", "sglang", "hf", "fake" or "auto". From here on the only one.
            actor: If given, its weights are sent at once.

        Raises:
            ValueError: Unknown `engine_type`, or no model is known.
        """
        from lightrft.engines.factory import build_engine

        config = self.config
        if args is not None and args is not self.args:
            config = StrategyConfig.from_args(args)
        kind = engine_session.check_engine_type(engine_type)
        if kind != config.engine_type:
            self.print(f"engine type is {kind} (the configuration said {config.engine_type})")
        self.config.engine_type = self.engine_type = kind
        module = None if actor is None else self._inner_model(actor)
        wanted = engine_session.engine_config(
            config, kind, has_gpu=self.device.type == "cuda", module=module
        )
        if config.engine_tp_size > wanted.tensor_parallel_size:
            self.print(
                f"the {kind} engine is not tensor-parallel: engine_tp_size "
                f"{config.engine_tp_size} only forms groups, each rank generates its own prompts"
            )
        with phase("start the inference engine", self._timeout):
            engine = build_engine(wanted, module=module)
        self.inference_engine = engine
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()
        return engine

    def _inner_model(self, model: nn.Module) -> nn.Module:
        """The Hugging Face model inside an actor or critic."""
        return checkpoint_module(self.unwrap_model(model))

    def maybe_sleep_inference_engine(self) -> None:
        """Puts the engine to sleep if there is one, sleeping is enabled and it is awake."""
        if self.config.enable_engine_sleep and self._session.sleep():
            self.print("Sleeped inference engine")

    def wakeup_inference_engine(self) -> None:
        """Frees the trainer's cached memory, then wakes the engine if it sleeps."""
        begin = time.monotonic()
        with phase("wake up the inference engine", self._timeout):
            woke = self._session.wake_up()
        if woke:
            self.report_memory("after wakeup inference engine")
            took = time.monotonic() - begin
            self.print(f"Finished {self.inference_engine_type} wakeup, TIMECOST {took:.3f}")

    def engine_generate_local(
        self,
        sampling_params: object,
        prompt_token_ids: Sequence[PromptItem] | Sequence[int] | None = None,
        multi_modal_inputs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Completion]:
        """Generates on this rank's engine without gathering prompts.

        Args:
            sampling_params: `SamplingParams` or a mapping of its fields.
            prompt_token_ids: Token ids per prompt; a flat list of ids is one prompt.
            multi_modal_inputs: Items `{"prompt": text, "multi_modal_data": {"image": [...],
                "video": [...]}}`.

        Returns:
            Completions, prompt-major.

        Raises:
            ValueError: Neither or both inputs were given.
            NotImplementedError: There is no engine.
        """
        if prompt_token_ids is None and multi_modal_inputs is None:
            raise ValueError("Either prompt_token_ids or multi_modal_inputs must be provided.")
        if prompt_token_ids is not None and multi_modal_inputs is not None:
            raise ValueError(
                "Both prompt_token_ids and multi_modal_inputs can not be provided at the same time."
            )
        params = engine_session.as_sampling_params(sampling_params)
        if multi_modal_inputs is not None:
            requests = engine_session.multimodal_requests(multi_modal_inputs, 0)
        else:
            requests = engine_session.text_requests(_as_prompts(prompt_token_ids or ()), 0)
        return self._session.generate_local(requests, params)

    @classmethod
    def _build_multimodal_inputs(
        cls,
        all_prompts: Sequence[str],
        all_images: Sequence[object] | None,
        images_num: Sequence[int] | None,
        all_videos: Sequence[object] | None,
        videos_num: Sequence[int] | None,
    ) -> list[dict[str, object]]:
        """Pairs prompts with images and videos; see `multimodal.build_multimodal_inputs`."""
        return multimodal.build_multimodal_inputs(
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
    ) -> list[Completion]:
        """Generates for the prompts of all ranks; each rank gets its own completions.

        Collective: every rank must call it, with lists that may differ in length and may be empty.
        Prompts are gathered within the group of ranks that share an engine. The engine is woken
        before and, with `sleep_engine`, put to sleep after, also if generation fails.

        Args:
            sampling_params: `SamplingParams` or a mapping of its fields.
            all_prompt_token_ids: Token ids (or `GenerationRequest`s), one per prompt.
            all_prompts: Prompts as text; needed with images or videos.
            all_images, all_videos: Nested (a list per prompt) or flat (cut by the counts).
            sleep_engine: Whether to put the engine to sleep afterwards (if enabled).
            images_num, videos_num: Media per prompt; inferred if None.

        Returns:
            This rank's completions, prompt-major: `n` consecutive ones for each prompt.

        Raises:
            NotImplementedError: There is no engine.
            ValueError, TypeError: This rank's arguments are wrong.
            RuntimeError: Another rank failed; the message names it. All ranks raise.
        """
        if self._session.engine is None:
            raise NotImplementedError("Inference engine is not initialized.")
        self.wakeup_inference_engine()
        batch = PromptBatch(
            all_prompt_token_ids, all_prompts, all_images, images_num, all_videos, videos_num
        )
        try:
            with phase("generate", self._timeout):
                completions = self._session.gather_and_generate(batch, sampling_params)
        finally:
            if sleep_engine:
                self.maybe_sleep_inference_engine()
        lengths = [len(completion.output_token_ids) for completion in completions]
        found = self.genlen_analyser.collect(
            lengths, self._profile_step, writes_files=self.is_rank_0()
        )
        if found is not None:
            self.print(f"step {self._profile_step} generation lengths: {found}")
        self._profile_step += 1
        return completions

    def update_engine_weights(self, actor: nn.Module) -> WeightSyncReport | None:
        """Sends the actor's weights to the engine, which is awake afterwards.

        Returns:
            What was sent and verified (also kept as `last_weight_sync`); None without an engine.

        Raises:
            RuntimeError: The engine does not hold the actor's weights; the message names them.
        """
        if self._session.engine is None:
            self.print("Skip update engine weights since inference engine is not initialized.")
            return None
        from lightrft.strategy.weight_sync import sync_engine_weights

        self.wakeup_inference_engine()
        with phase("update the engine's weights", self._timeout):
            report = sync_engine_weights(self, self._session.engine, actor)
        self.last_weight_sync = report
        self.sync_and_clear_cache()
        return report

    def _mark_engine_stale(self) -> None:
        """To be called by every `optimizer_step` that changed weights."""
        if self._session.engine is not None:
            self._session.engine.mark_stale("the trainer's weights changed since its last update")


def _as_prompts(items: Sequence[PromptItem] | Sequence[int]) -> list[PromptItem]:
    if items and all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return [cast("PromptItem", item) for item in items]
