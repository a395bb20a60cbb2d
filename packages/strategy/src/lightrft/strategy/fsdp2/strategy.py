"""Training with fully sharded data parallelism on DTensors."""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightrft.strategy.adapted_model import gathered_dtype
from lightrft.strategy.checkpoints import (
    RankGroup,
    SaveRequest,
    find_checkpoint,
    write_checkpoint,
)
from lightrft.strategy.deadlines import phase
from lightrft.strategy.fsdp2 import training_state
from lightrft.strategy.fsdp2.master_weights import MasterWeightsAdamW
from lightrft.strategy.fsdp2.sharding import (
    ShardingPlan,
    as_fsdp,
    gradient_norm,
    scale_gradients,
    shard_module,
)
from lightrft.strategy.fsdp2.source import fsdp2_parameter_source, reshard_modules
from lightrft.strategy.gathered_model import save_gathered_model
from lightrft.strategy.moving_averages import MovingAverages
from lightrft.strategy.optimizers import (
    AdamSettings,
    OptimizerStepResult,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel, wrapped_module
from lightrft.strategy.process_groups import resolve_shard_size
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.parameter_source import ParameterSource


class FSDPV2Strategy(StrategyBase):
    """FSDP2: parameters, gradients and optimizer states are sharded over ranks.

    Every repeated block is a unit; embeddings, a tied or untied head and the rest form the root
    unit. The wrapper's own forward is the only entry into a sharded model.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
        bf16: Replaces the configuration's `bf16`: compute in bfloat16 with float32 shards, states
            and reductions. None keeps it.
    """

    wraps_before_optimizer = True

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 0.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        bf16: bool | None = None,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        if bf16 is not None:
            self.config.bf16 = bf16
        has_gpu = self.device.type == "cuda"
        uses_bf16 = self.config.computes_in_bf16(has_gpu=has_gpu)
        self.compute_dtype = torch.bfloat16 if uses_bf16 else torch.float32
        self.uses_master_weights = self.config.use_mp_opt and uses_bf16
        if self.config.use_mp_opt and not uses_bf16:
            self.print("warning: option without effect: use_mp_opt acts only with bf16")
        self._averages = MovingAverages()
        self._meshes: dict[int, DeviceMesh] = {}
        self._offloaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @property
    def _ranks(self) -> RankGroup:
        return RankGroup(self.get_rank(), self.world_size, self.gather_objects)

    # ------------------------------------------------------------------ models

    def _mesh(self, shard_size: int) -> DeviceMesh:
        """Flat over all ranks, or (replicate, shard); made once per size."""
        size = resolve_shard_size(shard_size, self.world_size)
        if size not in self._meshes:
            if size == self.world_size:
                shape, names = (size,), ("shard",)
            else:
                shape, names = (self.world_size // size, size), ("replicate", "shard")  # type: ignore[assignment]
            self._meshes[size] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[size]

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Where models are built. With `meta_init` only rank 0 gives them memory.

        `prepare_model` then sends rank 0's weights to all ranks. transformers' `from_pretrained`
        refuses to load onto the meta device, so the other ranks build from the configuration.
        """
        with super().init_model_context(meta_init=meta_init and self.get_rank() != 0):
            yield

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Shards a model in place; one that is sharded already is returned as it is.

        Models for training keep float32 shards (bfloat16 with `use_mp_opt`), others are stored in
        the compute dtype, without gradients. If some ranks hold the model on the meta device,
        rank 0's weights are sent to all. See `StrategyBase.prepare_model`.
        """
        if isinstance(model, FSDPModule):
            return model
        stores_compute_dtype = not is_training or self.uses_master_weights
        plan = ShardingPlan(
            mesh=self._mesh(shard_size),
            device=self.device,
            param_dtype=self.compute_dtype if stores_compute_dtype else torch.float32,
            compute_dtype=self.compute_dtype,
            reshard_after_forward=reshard_after_forward,
            offloads_to_cpu=self.config.fsdp_cpu_offload and is_training,
            keeps_vision_whole=self.config.mixed_mm_data,
        )
        if not is_training:
            model.eval().requires_grad_(False)
        with phase("shard a model", self._timeout):
            return shard_module(model, plan)

    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
        """AdamW on this rank's shards; biases and norm gains are not decayed."""
        settings = AdamSettings.read(kwargs, self.config)
        module = self.unwrap_model(model)
        reshard_modules(module)
        groups = parameter_groups(module.named_parameters(), settings.weight_decay)
        if self.uses_master_weights:
            return MasterWeightsAdamW(groups, settings)
        is_fused = self.device.type == "cuda" and not self.config.fsdp_cpu_offload
        return torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True if is_fused else None,
        )

    def _prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Also takes an optimizer made before sharding, as long as it has not stepped."""
        if not isinstance(model, FSDPModule):
            if optimizer.state:
                raise ValueError(
                    "an optimizer that has stepped cannot follow its model into FSDP2: call "
                    "prepare_model(model, is_training=True) before create_optimizer"
                )
            names = {id(p): name for name, p in model.named_parameters()}
            model = self.prepare_model(model, is_training=True)
            sharded = dict(model.named_parameters())
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        return PreparedModel(model, optimizer, scheduler)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Shards without any gather; see `StrategyBase.parameter_source`."""
        return fsdp2_parameter_source(self.unwrap_model(model))

    # ------------------------------------------------------------------ training

    def backward(
        self, loss: Tensor, model: AnyModel, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Adds the gradients of one micro-batch; see `StrategyBase.backward`.

        Gradients are reduced to shards after every micro-batch, so they never take the memory of
        a whole model. On a hybrid mesh the replicas exchange them on the last one only.
        """
        _refuse(kwargs, "backward")
        state = self.accumulation_state(optimizer)
        as_fsdp(wrapped_module(model)).set_requires_all_reduce(state.is_last())
        (loss * state.loss_scale(self.num_averaging_ranks)).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: AnyModel,
        scheduler: LRScheduler | None,
        name: str = "model",
        **kwargs: object,
    ) -> OptimizerStepResult | None:
        """Counts a micro-batch and acts on the last; see `StrategyBase.optimizer_step`."""
        _refuse(kwargs, "optimizer_step")
        as_fsdp(wrapped_module(model))
        if not self.accumulation_state(optimizer).advance():
            return None
        self.maybe_load_optimizer(optimizer)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters, self.device)
        # The norm is one number, summed over all ranks, so all ranks decide alike.
        is_finite = math.isfinite(norm)
        if is_finite:
            if 0 < self.max_norm < norm:
                scale_gradients(parameters, self.max_norm / (norm + 1e-6))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self._mark_engine_stale()
        else:
            self.num_skipped_steps[name] += 1
        optimizer.zero_grad()
        return OptimizerStepResult(norm, not is_finite, learning_rate)

    def moving_average(self, model: AnyModel, model_ema: AnyModel, beta: float = 0.992) -> None:
        """Averages shard by shard, in float32; see `StrategyBase.moving_average`."""
        self._averages.update(
            self.parameter_source(model), self.parameter_source(model_ema), beta=beta
        )

    # ------------------------------------------------------------------ memory

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """With `adam_offload`, moves the states to the CPU, bit for bit; idempotent."""
        if not self.config.adam_offload or self.config.fsdp_cpu_offload:
            return optimizer
        if optimizer not in self._offloaded:
            _move_states(optimizer, torch.device("cpu"))
            self._offloaded.add(optimizer)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return optimizer

    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | None = None
    ) -> Optimizer:
        """Moves offloaded states back; called by `optimizer_step` if the caller did not."""
        if optimizer in self._offloaded:
            _move_states(optimizer, self.device if device is None else torch.device(device))
            self._offloaded.discard(optimizer)
        return optimizer

    def offload_model(self, model: AnyModel) -> nn.Module:
        """Moves an idle model's shards to the CPU."""
        reshard_modules(self.unwrap_model(model))
        return super().offload_model(model)

    # ------------------------------------------------------------------ files

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
    ) -> None:
        """Each rank writes its shards; see `StrategyBase.save_ckpt`."""
        found = self._resolve(model, optimizer, scheduler)
        request = SaveRequest(
            save_dir=Path(save_dir),
            strategy=type(self).__name__,
            tag=tag,
            max_num=max_num,
            max_mem=max_mem,
            client_state=client_state or {},
            save_latest=save_latest,
        )
        with phase("save a checkpoint", self._timeout):
            write_checkpoint(
                request, lambda folder: self._write_shards(folder, found), ranks=self._ranks
            )

    def _write_shards(self, folder: Path, found: PreparedModel) -> None:
        module, rank = self.unwrap_model(found), self.get_rank()
        training_state.save_module(folder, module, rank=rank)
        if found.optimizer is not None:
            training_state.save_optimizer(folder, module, found.optimizer, rank=rank)
        if found.scheduler is not None and rank == 0:
            training_state.save_scheduler(folder, found.scheduler)

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
    ) -> tuple[str, dict[str, object]]:
        """Each rank reads the rows it holds; the number of ranks may have changed.

        See `StrategyBase.load_ckpt`. Random number generators are restored as well, except with
        `load_module_only`, and on ranks that the saving run did not have.
        """
        found = self._resolve(model, optimizer, scheduler)
        module = self.unwrap_model(found)
        with phase("load a checkpoint", self._timeout):
            checkpoint = find_checkpoint(Path(load_dir), tag, ranks=self._ranks)
            checkpoint.require_strategy(type(self).__name__)
            training_state.load_module(checkpoint.path, module, strict=load_module_strict)
            self._averages.forget(module)
            self._mark_engine_stale()
            if not load_module_only:
                if found.optimizer is not None and load_optimizer_states:
                    self.maybe_load_optimizer(found.optimizer)
                    training_state.load_optimizer(checkpoint.path, module, found.optimizer)
                if found.scheduler is not None and load_lr_scheduler_states:
                    training_state.load_scheduler(checkpoint.path, found.scheduler)
                if not checkpoint.restore_rng(self.get_rank()):
                    self.print(f"{checkpoint.path} has no generator states for every rank")
            self.barrier()
        return str(checkpoint.path), checkpoint.client_state()

    def save_model(self, model: AnyModel, tokenizer: object | None, output_dir: str) -> None:
        """Gathers one parameter at a time and writes on rank 0, in the compute dtype."""
        module = self.unwrap_model(model)
        is_writer = self.get_rank() == 0
        with phase("save a model", self._timeout):
            dtype = gathered_dtype(module, self.compute_dtype)
            state = training_state.gather_module(module, dtype, keeps=is_writer)
            self._ranks.on_first(
                lambda: save_gathered_model(
                    module, state, tokenizer, Path(output_dir), dtype=self.compute_dtype
                )
            )

    def load_model(self, model: AnyModel, path: str, strict: bool = True) -> None:
        """Reads full weights; each rank reads the rows it holds. See `StrategyBase.load_model`."""
        module = self.unwrap_model(model)
        training_state.load_full_weights(Path(path), module, strict=strict)
        self._averages.forget(module)
        self._mark_engine_stale()


def _move_states(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            # The counter stays where the optimizer put it.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = value.to(device)


def _refuse(kwargs: Mapping[str, object], method: str) -> None:
    if kwargs:
        raise TypeError(f"{method} got unknown options: {', '.join(sorted(kwargs))}")
