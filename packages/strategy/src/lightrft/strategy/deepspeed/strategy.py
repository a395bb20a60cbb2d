"""Training with DeepSpeed ZeRO."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightrft.strategy.checkpoints.gathered_model import save_gathered_model
from lightrft.strategy.checkpoints.methods import CheckpointMethods, WantedState
from lightrft.strategy.deepspeed import runtime, training_state
from lightrft.strategy.deepspeed.engine_config import (
    ZeroSettings,
    inference_config,
    training_config,
)
from lightrft.strategy.deepspeed.source import zero_parameter_source
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.optimizers import (
    AdamSettings,
    clip_gradients,
    gradient_norm,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel, wrapped_module
from lightrft.strategy.training_interface import refuse_options
from lightrft.strategy.weight_sync.adapted_model import gathered_dtype
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.checkpoints.file_writers import FileWriter
    from lightrft.strategy.checkpoints.manifest import Checkpoint
    from lightrft.strategy.optimizers import OptimizerStepResult
    from lightrft.strategy.weight_sync.parameter_source import ParameterSource


class DeepspeedStrategy(CheckpointMethods):
    """DeepSpeed ZeRO stages 0 to 3 with torch's AdamW.

    A model in training is a DeepSpeed engine around the actor or critic. Models that are only
    evaluated are sharded in stage 3 and whole on every rank otherwise.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
        zero_stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; 0 nothing.
            None takes the configuration's.
        bf16: Replaces the configuration's `bf16`; None keeps it.

    Raises:
        ValueError: The stage and other options exclude each other.
    """

    is_fsdp = False

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 0.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        zero_stage: int | None = None,
        bf16: bool | None = None,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        if bf16 is not None:
            self.config.bf16 = bf16
        self.stage = self.config.zero_stage if zero_stage is None else zero_stage
        has_gpu = self.device.type == "cuda"
        uses_bf16 = self.config.computes_in_bf16(has_gpu=has_gpu)
        self.compute_dtype = torch.bfloat16 if uses_bf16 else torch.float32
        self._settings = ZeroSettings(
            stage=self.stage,
            uses_bf16=uses_bf16,
            max_norm=self.max_norm,
            micro_batch_size=self.micro_train_batch_size,
            offloads_adam=self.adam_offload,
            pins_memory=has_gpu,
            zpg=self.zpg,
            grad_accum_dtype=self.grad_accum_dtype,
            overlap_comm=self.overlap_comm,
        )
        self._engines: weakref.WeakKeyDictionary[Optimizer, nn.Module] = weakref.WeakKeyDictionary()
        self._has_told_offload = False

    def _start_processes(self, timeout: timedelta | None) -> bool:
        is_started_here = super()._start_processes(timeout)
        runtime.start(timeout or self._timeout)
        return is_started_here

    def _end_processes(self) -> None:
        """DeepSpeed's process groups end with ours."""
        runtime.stop()
        super()._end_processes()

    # ------------------------------------------------------------------ models

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Places a model; stage 3 shards it over all ranks unless `shard_size` is 1.

        A model for training is only moved to the device: `prepare` makes its engine, together
        with the optimizer. See `StrategyBase.prepare_model`.
        """
        del reshard_after_forward  # ZeRO always frees gathered parameters.
        size = resolve_shard_size(shard_size, self.world_size)
        if runtime.is_engine_module(model):
            return model
        share_sequences(model, self.sp_group, is_trained=is_training)
        if is_training:
            return model.to(self.device)
        model.eval().requires_grad_(False)
        if self.stage == 3 and size > 1:
            with phase("shard a model", self._timeout):
                engine = runtime.initialize(model, inference_config(self._settings))
            engine.eval()
            return engine
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.compute_dtype)
        return model.to(self.device)

    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
        """AdamW of torch; biases and norm gains are not decayed. Call it before `prepare`."""
        settings = AdamSettings.read(kwargs, self.config)
        groups = parameter_groups(
            self.unwrap_model(model).named_parameters(), settings.weight_decay
        )
        is_fused = self.device.type == "cuda" and not self.adam_offload
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
        """The schedule stays ours: it must not advance with a skipped step."""
        share_sequences(model, self.sp_group, is_trained=True)
        num_elements = sum(p.numel() for p in model.parameters())
        config = training_config(self._settings, num_elements=num_elements)
        with phase("prepare a model for training", self._timeout):
            engine = runtime.initialize(model, config, optimizer)
        self._engines[optimizer] = engine
        return PreparedModel(engine, optimizer, scheduler)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Parameters as the forward uses them, without any gather."""
        module = wrapped_module(model)
        if runtime.is_engine_module(module):
            return zero_parameter_source(runtime.as_engine(module))
        return module_parameter_source(self.unwrap_model(model))

    # ------------------------------------------------------------------ training

    def _discard_gradients(self, optimizer: Optimizer) -> None:
        if optimizer in self._engines:
            runtime.discard_gradients(runtime.as_engine(self._engines[optimizer]))

    def backward(
        self, loss: Tensor, model: AnyModel, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Adds the gradients of one micro-batch; see `StrategyBase.backward`."""
        refuse_options(kwargs, "backward")
        engine = runtime.as_engine(wrapped_module(model))
        state = self.accumulation_state(optimizer)
        engine.set_gradient_accumulation_boundary(state.is_last())
        engine.backward(loss * state.loss_scale(self.num_averaging_ranks), scale_wrt_gas=False)

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
        engine = runtime.as_engine(wrapped_module(model))
        if not self.accumulation_state(optimizer).advance():
            return None
        learning_rate = float(optimizer.param_groups[0]["lr"])
        norm = self._step_plain(engine, optimizer) if self.stage == 0 else _step_zero(engine)
        return self._conclude_step(norm, scheduler, name, learning_rate)

    def _step_plain(self, engine: runtime.ZeroEngine, optimizer: Optimizer) -> float:
        """Stage 0: every rank holds the same averaged gradients; DeepSpeed reports no norm."""
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters)
        if torch.isfinite(norm):
            clip_gradients(parameters, norm, self.max_norm)
            engine.step()
        else:
            engine.zero_grad()
        return float(norm)

    # ------------------------------------------------------------------ memory

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Nothing to do, as is said once: with `adam_offload` the states live on the CPU."""
        if not self._has_told_offload:
            self.print(
                "optimizer states are not moved between phases: that is for FSDP2; with DeepSpeed "
                "adam_offload keeps them on the CPU"
            )
            self._has_told_offload = True
        return optimizer

    def offload_model(self, model: AnyModel) -> nn.Module:
        """Moves a whole model to the CPU; an engine stays, since ZeRO manages its memory."""
        module = wrapped_module(model)
        return module if runtime.is_engine_module(module) else module.to("cpu")

    def reload_model(self, model: AnyModel) -> nn.Module:
        """Moves a model back to this rank's device."""
        module = wrapped_module(model)
        return module if runtime.is_engine_module(module) else module.to(self.device)

    # ------------------------------------------------------------------ files

    def _checkpoint_details(self) -> Mapping[str, int | str]:
        return {"zero_stage": self.stage}

    def _write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """DeepSpeed's files inside a checkpoint folder of ours."""
        engine = runtime.as_engine(wrapped_module(found))
        training_state.save(folder, engine, found.scheduler, files, is_first=self.get_rank() == 0)

    def _read_state(
        self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState
    ) -> None:
        """With optimizer states, only by as many ranks and in the stage that saved it.

        Pickled code in DeepSpeed's files is refused.
        """
        engine = runtime.as_engine(wrapped_module(found))
        folder = checkpoint.path
        if wanted.optimizer:
            checkpoint.require_strategy(type(self).__name__, world_size=self.world_size)
            checkpoint.require_details(self._checkpoint_details())
            training_state.load(folder, engine, strict=wanted.strict)
        else:
            training_state.load_weights(folder, engine, strict=wanted.strict)
        if wanted.scheduler and found.scheduler is not None:
            training_state.load_scheduler(folder, found.scheduler)

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
        """Reads full weights into parameters and masters; see `StrategyBase.load_model`."""
        module = self.unwrap_model(model)
        training_state.load_full_weights(Path(path), module, strict=strict)
        self._averages.forget(module)
        self._mark_engine_stale()


def _step_zero(engine: runtime.ZeroEngine) -> float:
    """Stages 1 to 3: DeepSpeed clips, and skips the update if any rank's gradients overflow."""
    engine.step()
    if engine.optimizer.overflow:
        return math.nan
    norm = engine.get_global_grad_norm()
    if norm is None:
        raise RuntimeError("DeepSpeed reports no gradient norm: leave compute_grad_norm on")
    return float(norm)
