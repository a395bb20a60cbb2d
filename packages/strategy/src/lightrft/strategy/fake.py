"""A single-process strategy that really trains, without any process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from lightrft.strategy.checkpoints.gathered_model import (
    WeightFiles,
    as_saved,
    check_names,
    save_gathered_model,
)
from lightrft.strategy.checkpoints.methods import CheckpointMethods, WantedState
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed.collectives import ALONE, Group
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.optimizers import (
    AdamSettings,
    OptimizerStepResult,
    clip_gradients,
    gradient_norm,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel
from lightrft.strategy.training_interface import refuse_options
from lightrft.strategy.weight_sync.adapted_model import gathered_dtype
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    module_parameter_source,
    tied_parameter_names,
)

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.checkpoints.file_writers import FileWriter
    from lightrft.strategy.checkpoints.manifest import Checkpoint

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"


class FakeStrategy(CheckpointMethods):
    """The whole interface in one process: for tests, for debugging, for one small device.

    Collectives are those of a single rank, whatever torch.distributed says. Nothing is faked in
    training: losses are differentiated, gradients clipped, AdamW steps.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)

    @property
    def world_group(self) -> Group:
        """This process alone."""
        return ALONE

    def _start_processes(self, timeout: timedelta | None) -> bool:
        del timeout
        return False

    def _create_engine_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        return None, None

    @classmethod
    def is_rank_0(cls) -> bool:
        """True: there is one rank."""
        return True

    @classmethod
    def _barrier_all(cls) -> None:
        return

    @property
    def _compute_dtype(self) -> torch.dtype:
        uses_bf16 = self.config.computes_in_bf16(has_gpu=self.device.type == "cuda")
        return torch.bfloat16 if uses_bf16 else torch.float32

    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
        """AdamW; biases and norm gains are not decayed. See `StrategyBase.create_optimizer`."""
        settings = AdamSettings.read(kwargs, self.config)
        groups = parameter_groups(
            self.unwrap_model(model).named_parameters(), settings.weight_decay
        )
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Moves the model to the device; see `StrategyBase.prepare_model`."""
        del reshard_after_forward
        resolve_shard_size(shard_size, self.world_size)
        share_sequences(model, self.sp_group, is_trained=is_training)
        model = model.to(self.device)
        uses_bf16 = self._compute_dtype == torch.bfloat16
        if not is_training:
            model = model.eval().requires_grad_(False)
            return model.to(torch.bfloat16) if uses_bf16 else model
        if uses_bf16:
            self._compute_in_bf16(model)
        return model

    def _compute_in_bf16(self, model: nn.Module) -> None:
        """Parameters stay as they are; only the forward pass computes in bfloat16."""
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16)
        if "forward" not in vars(model):
            model.forward = autocast(model.forward)

    def _prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        return PreparedModel(self.prepare_model(model, is_training=True), optimizer, scheduler)

    def backward(
        self, loss: Tensor, model: AnyModel, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Adds the gradients of one micro-batch; see `StrategyBase.backward`."""
        del model
        refuse_options(kwargs, "backward")
        scale = self.accumulation_state(optimizer).loss_scale(self.num_averaging_ranks)
        (loss * scale).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: AnyModel,
        scheduler: LRScheduler | None,
        name: str = "model",
        **kwargs: object,
    ) -> OptimizerStepResult | None:
        """Counts a micro-batch and acts on the last; see `StrategyBase.optimizer_step`."""
        del model
        refuse_options(kwargs, "optimizer_step")
        if not self.accumulation_state(optimizer).advance():
            return None
        learning_rate = float(optimizer.param_groups[0]["lr"])
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters)
        if torch.isfinite(norm):
            clip_gradients(parameters, norm, self.max_norm)
            optimizer.step()
        optimizer.zero_grad()
        return self._conclude_step(float(norm), scheduler, name, learning_rate)

    def _write_state(self, folder: Path, found: PreparedModel, files: FileWriter) -> None:
        files.tensors(folder / MODEL_FILE, self.unwrap_model(found).state_dict())
        if found.optimizer is not None:
            files.pickled(folder / OPTIMIZER_FILE, found.optimizer.state_dict())
        if found.scheduler is not None:
            files.pickled(folder / SCHEDULER_FILE, found.scheduler.state_dict())

    def _read_state(
        self, checkpoint: Checkpoint, found: PreparedModel, wanted: WantedState
    ) -> None:
        folder = checkpoint.path
        tensors = load_file(folder / MODEL_FILE)
        self.unwrap_model(found).load_state_dict(tensors, strict=wanted.strict)
        for is_wanted, file, target in (
            (wanted.optimizer, OPTIMIZER_FILE, found.optimizer),
            (wanted.scheduler, SCHEDULER_FILE, found.scheduler),
        ):
            if is_wanted and target is not None:
                if not (folder / file).is_file():
                    raise FileNotFoundError(
                        f"{folder} has no {file}: it was saved without; load it with "
                        "load_module_only=True"
                    )
                target.load_state_dict(torch.load(folder / file, weights_only=True))

    def save_model(self, model: AnyModel, tokenizer: object | None, output_dir: str) -> None:
        """Writes the model in Hugging Face format; see `StrategyBase.save_model`."""
        module = self.unwrap_model(model)
        tied, dtype = tied_parameter_names(module), gathered_dtype(module, self._compute_dtype)
        state = {
            name: as_saved(value, dtype)
            for name, value in module.state_dict().items()
            if name not in tied
        }
        save_gathered_model(module, state, tokenizer, Path(output_dir), dtype=self._compute_dtype)

    def load_model(self, model: AnyModel, path: str, strict: bool = True) -> None:
        """Reads full weights; see `StrategyBase.load_model`."""
        module = self.unwrap_model(model)
        files = WeightFiles(Path(path), module)
        state = module.state_dict()
        names, note = check_names(set(state), files.names, source=path, strict=strict)
        if note is not None:
            self.print(f"warning: {note}")
        for name in names:
            target = state[name]
            target.copy_(files.rows(name, 0, target.shape[0] if target.dim() else 0))
        self._mark_engine_stale()

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Every parameter, whole; see `StrategyBase.parameter_source`."""
        return module_parameter_source(self.unwrap_model(model))


def get_fake_strategy(args: Arguments | None = None) -> FakeStrategy:
    """A strategy for one process, without torchrun and without a process group.

    Args:
        args: A Namespace, mapping or StrategyConfig; None takes every default, and one sample per
            optimizer step.
    """
    if args is None:
        return FakeStrategy()
    config = StrategyConfig.from_args(args)
    return FakeStrategy(
        config.seed,
        config.max_norm,
        config.micro_train_batch_size,
        config.train_batch_size,
        args,
    )
