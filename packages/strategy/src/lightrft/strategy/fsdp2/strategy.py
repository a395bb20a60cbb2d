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

from lightrft.strategy.checkpoints.gathered_model import save_gathered_model
from lightrft.strategy.checkpoints.methods import CheckpointMethods, WantedState
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.fsdp2 import training_state
from lightrft.strategy.fsdp2.empty_models import (
    is_empty_everywhere,
    meta_parameters,
    pretrained_directory,
    shard_empty_module,
)
from lightrft.strategy.fsdp2.master_weights import MasterWeightsAdamW
from lightrft.strategy.fsdp2.sharding import (
    ShardingPlan,
    as_fsdp,
    gradient_norm,
    scale_gradients,
    shard_module,
)
from lightrft.strategy.fsdp2.source import fsdp2_parameter_source, reshard_modules
from lightrft.strategy.meta_init import parameters_on_meta
from lightrft.strategy.optimizers import (
    AdamSettings,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel, wrapped_module
from lightrft.strategy.training_interface import refuse_options
from lightrft.strategy.weight_sync.adapted_model import gathered_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.checkpoints.file_writers import FileWriter
    from lightrft.strategy.checkpoints.manifest import Checkpoint
    from lightrft.strategy.optimizers import OptimizerStepResult
    from lightrft.strategy.weight_sync.parameter_source import ParameterSource


class FSDPV2Strategy(CheckpointMethods):
    """FSDP2: parameters, gradients and optimizer states are sharded over ranks.

    Every repeated block is a unit; embeddings, a tied or untied head and the rest form the root
    unit. The wrapper's own forward is the only entry into a sharded model.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
        bf16: Replaces the configuration's `bf16`: compute in bfloat16 with float32 shards, states
            and reductions. None keeps it.
    """

    is_fsdp = True
    wraps_before_optimizer = True
    builds_on_meta = True

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
        self._meshes: dict[int, DeviceMesh] = {}
        self._offloaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()

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
        """Where models are built. With `meta_init` their parameters get no memory yet.

        `prepare_model` shards them first and then reads the rows that this rank holds from the
        directory in the model's configuration, so no rank ever holds a whole model.
        """
        with super().init_model_context(meta_init), parameters_on_meta(meta_init):
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
        the compute dtype, without gradients. Parameters on the meta device are read from the
        model's directory; if rank 0 has real ones, those are sent to all ranks. See
        `StrategyBase.prepare_model`.
        """
        if isinstance(model, FSDPModule):
            return model
        share_sequences(model, self.sp_group, is_trained=is_training)
        stores_compute_dtype = not is_training or self.uses_master_weights
        plan = ShardingPlan(
            mesh=self._mesh(shard_size),
            device=self.device,
            param_dtype=self.compute_dtype if stores_compute_dtype else torch.float32,
            compute_dtype=self.compute_dtype,
            reshard_after_forward=reshard_after_forward,
            offloads_to_cpu=self.config.fsdp_cpu_offload and is_training,
            keeps_vision_whole=self.config.mixed_mm_data,
            compile_backend=self.config.compile_backend,
        )
        if not is_training:
            model.eval().requires_grad_(False)
        with phase("shard a model", self._timeout):
            on_meta = meta_parameters(model)
            if not is_empty_everywhere(on_meta):
                return shard_module(model, plan)
            path = pretrained_directory(model)
            shard_empty_module(model, plan)
            training_state.load_full_weights(path, model, strict=True, names=on_meta)
            return model

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
        refuse_options(kwargs, "backward")
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
        refuse_options(kwargs, "optimizer_step")
        as_fsdp(wrapped_module(model))
        if not self.accumulation_state(optimizer).advance():
            return None
        self.maybe_load_optimizer(optimizer)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters, self.device)
        # The norm is one number, summed over all ranks, so all ranks decide alike.
        if math.isfinite(norm):
            if 0 < self.max_norm < norm:
                scale_gradients(parameters, self.max_norm / (norm + 1e-6))
            optimizer.step()
        optimizer.zero_grad()
        return self._conclude_step(norm, scheduler, name, learning_rate)

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

    def _write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """Each rank writes its shards."""
        module, rank = self.unwrap_model(found), self.get_rank()
        training_state.save_module(folder, module, files, rank=rank)
        if found.optimizer is not None:
            training_state.save_optimizer(folder, module, found.optimizer, files, rank=rank)
        if found.scheduler is not None and rank == 0:
            training_state.save_scheduler(folder, found.scheduler, files)

    def _read_state(
        self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState
    ) -> None:
        """Each rank reads the rows it holds; the number of ranks may have changed."""
        module = self.unwrap_model(found)
        training_state.load_module(checkpoint.path, module, strict=wanted.strict)
        if wanted.optimizer and found.optimizer is not None:
            self.maybe_load_optimizer(found.optimizer)
            training_state.load_optimizer(checkpoint.path, module, found.optimizer)
        if wanted.scheduler and found.scheduler is not None:
            training_state.load_scheduler(checkpoint.path, found.scheduler)

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
