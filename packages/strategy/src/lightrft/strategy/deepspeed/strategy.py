"""Training with DeepSpeed ZeRO."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import BackendOptions
from lightrft.strategy.backend import (
    AnyModel,
    Arguments,
    Backend,
    PreparedModel,
    WantedState,
    inner_module,
    wrapped_module,
)
from lightrft.strategy.checkpoints.files import FileWriter
from lightrft.strategy.checkpoints.manifest import Checkpoint
from lightrft.strategy.deepspeed import runtime, weights
from lightrft.strategy.deepspeed.engine_config import (
    check_stage,
    check_whole_model,
    inference_config,
    training_config,
)
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.optimizers import clip_gradients, gradient_norm, optimizer_parameters
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, module_parameter_source

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class ZeroBackend(Backend):
    """DeepSpeed engines around models, with torch's AdamW.

    Raises (`start`):
        ValueError: The stage and other options exclude each other.
    """

    name = "Deepspeed"

    def __init__(self, context: DistributedContext, config: BackendOptions) -> None:
        super().__init__(context, config)
        self._engines: weakref.WeakKeyDictionary[Optimizer, nn.Module] = weakref.WeakKeyDictionary()
        self._has_reported_offload = False

    def start(self) -> None:
        """Let DeepSpeed take over the process group that has started."""
        check_stage(self.config, uses_bf16=self.context.computes_in_bf16)
        runtime.start(self.context.timeout)

    def check_model_size(self, num_elements: int) -> None:
        """Refuse a model that does not fit one device, whatever the stage."""
        if self.context.has_gpu:
            _, total = torch.cuda.mem_get_info()
            check_whole_model(
                self.config, num_elements, total, uses_bf16=self.context.computes_in_bf16
            )

    def stop(self) -> None:
        """End DeepSpeed's process groups with ours."""
        runtime.stop()

    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool = False,
        shard_size: int = -1,
        reshard: bool = True,
    ) -> nn.Module:
        """Place a model; stage 3 shards it over all ranks unless `shard_size` is 1.

        A model for training is only moved to the device: `prepare` makes its engine, together
        with the optimizer. See `StrategyBase.prepare_model`.
        """
        del reshard  # ZeRO always frees gathered parameters.
        size = resolve_shard_size(shard_size, self.context.world_size)
        if runtime.is_engine_module(model):
            return model
        share_sequences(model, self.context.sp_group, is_trained=is_training)
        self.check_model_size(sum(parameter.numel() for parameter in model.parameters()))
        if is_training:
            # In the current dtype, until `prepare` casts it.
            return model.to(self.context.device)
        model.eval().requires_grad_(False)
        if self.config.zero_stage == 3 and size > 1:
            with phase("shard a model", self.context.timeout):
                engine = runtime.initialize(
                    model, inference_config(self.config, uses_bf16=self.context.computes_in_bf16)
                )
            engine.eval()
            return engine
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.context.compute_dtype)
        return model.to(self.context.device)

    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Make an engine; the schedule stays ours, lest it advance with a skipped step."""
        share_sequences(model, self.context.sp_group, is_trained=True)
        self.check_model_size(sum(p.numel() for p in model.parameters()))
        config = training_config(
            self.config,
            uses_bf16=self.context.computes_in_bf16,
            has_gpu=self.context.has_gpu,
            num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        )
        with phase("prepare a model for training", self.context.timeout):
            engine = runtime.initialize(model, config, optimizer)
        self._engines[optimizer] = engine
        return PreparedModel(engine, optimizer, scheduler)

    def check_trainable(self, model: AnyModel) -> None:
        """Raise a TypeError unless the model is a DeepSpeed engine."""
        runtime.as_engine(wrapped_module(model))

    def backward(self, loss: Tensor, model: AnyModel, *, is_last: bool) -> None:
        """Add and reduce the gradients of one micro-batch."""
        engine = runtime.as_engine(wrapped_module(model))
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss, scale_wrt_gas=False)

    def step(self, optimizer: Optimizer, model: AnyModel) -> float:
        """Clip and update; in stage 0 DeepSpeed neither clips nor reports a norm."""
        engine = runtime.as_engine(wrapped_module(model))
        if self.config.zero_stage > 0:
            return _step_zero(engine)
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters)
        if math.isfinite(norm):
            clip_gradients(parameters, norm, self.config.max_norm)
            engine.step()
        else:
            engine.zero_grad()
        return norm

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Drop the gradients, also those that the engine has reduced."""
        if optimizer in self._engines:
            runtime.discard_gradients(runtime.as_engine(self._engines[optimizer]))

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        """Do nothing, and say so once: with `adam_offload` the states live on the CPU."""
        if not self._has_reported_offload:
            self.context.print(
                "optimizer states are not moved between phases: that is for FSDP2; with DeepSpeed "
                "adam_offload keeps them on the CPU"
            )
            self._has_reported_offload = True

    def move_model(self, model: AnyModel, device: torch.device) -> nn.Module:
        """Move a whole model; an engine stays, since ZeRO manages its memory."""
        module = wrapped_module(model)
        return module if runtime.is_engine_module(module) else module.to(device)

    def local_part(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, with the padding of stage 3."""
        return runtime.local_part(parameter)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Return parameters as the forward uses them, without any gather."""
        module = wrapped_module(model)
        if runtime.is_engine_module(module):
            return weights.zero_parameter_source(runtime.as_engine(module))
        return module_parameter_source(inner_module(model))

    @property
    def checkpoint_details(self) -> Mapping[str, int | str]:
        """Return facts about the stage: files of one stage cannot be read by another."""
        return {"zero_stage": self.config.zero_stage}

    def write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        """Write DeepSpeed's files inside a checkpoint folder of ours. Collective."""
        engine = runtime.as_engine(wrapped_module(found))
        with runtime.saving_by(engine, files):
            engine.save_checkpoint(str(folder), weights.FOLDER, {}, False)

    def read_state(self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState) -> None:
        """Read a checkpoint; optimizer states need the ranks and stage that saved them.

        Refuse pickled code in DeepSpeed's files.
        """
        engine = runtime.as_engine(wrapped_module(found))
        if not wanted.optimizer:
            weights.load_weights(checkpoint.path, engine, strict=wanted.strict)
            return
        checkpoint.require_world_size(self.context.world_size)
        checkpoint.require_details(self.checkpoint_details)
        with runtime.weights_only_loading():
            path, _ = engine.load_checkpoint(
                str(checkpoint.path),
                weights.FOLDER,
                load_module_strict=wanted.strict,
                load_lr_scheduler_states=False,
            )
        if path is None:
            raise CheckpointError(f"{checkpoint.path} holds no DeepSpeed checkpoint")

    def full_values(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield full values, gathering one parameter at a time."""
        return weights.full_values(module)

    def full_states(self, found: PreparedModel) -> Iterator[tuple[str, Tensor]]:
        """Yield float32 masters where there are any; see `Backend.full_states`."""
        if self.config.zero_stage == 0:
            yield from super().full_states(found)
            return
        engine = runtime.as_engine(wrapped_module(found))
        yield from weights.full_states(engine, found.optimizer)

    def load_weights(self, module: nn.Module, path: Path, *, strict: bool) -> None:
        """Read full weights into parameters and masters."""
        weights.load_full_weights(path, module, strict=strict)


class DeepspeedStrategy(StrategyBase):
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
        sizes = (seed, max_norm, micro_train_batch_size, train_batch_size)
        super().__init__(
            *sizes, args, backend=ZeroBackend, fsdp=False, zero_stage=zero_stage, bf16=bf16
        )


def _step_zero(engine: DeepSpeedEngine) -> float:
    """Step in stages 1 to 3: DeepSpeed clips, and skips the update if gradients overflow."""
    engine.step()
    if engine.optimizer.overflow:
        return math.nan
    norm = engine.get_global_grad_norm()
    if norm is None:
        raise RuntimeError("DeepSpeed reports no gradient norm: leave compute_grad_norm on")
    return float(norm)
