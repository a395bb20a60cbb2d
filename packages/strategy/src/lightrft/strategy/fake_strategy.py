"""A single-process strategy that really trains, without any process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from lightrft.strategy.adapted_model import gathered_dtype
from lightrft.strategy.checkpoints import SaveRequest, find_checkpoint, write_checkpoint
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.distributed import ALONE, Group
from lightrft.strategy.gathered_model import (
    WeightFiles,
    as_saved,
    check_names,
    save_gathered_model,
)
from lightrft.strategy.optimizers import (
    AdamSettings,
    OptimizerStepResult,
    clip_gradients,
    gradient_norm,
    optimizer_parameters,
    parameter_groups,
)
from lightrft.strategy.parameter_source import (
    ParameterSource,
    module_parameter_source,
    tied_parameter_names,
)
from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel
from lightrft.strategy.process_groups import resolve_shard_size
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"


class FakeStrategy(StrategyBase):
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
        _refuse(kwargs, "backward")
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
        _refuse(kwargs, "optimizer_step")
        if not self.accumulation_state(optimizer).advance():
            return None
        learning_rate = float(optimizer.param_groups[0]["lr"])
        parameters = optimizer_parameters(optimizer)
        norm = gradient_norm(parameters)
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            clip_gradients(parameters, norm, self.max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            self._mark_engine_stale()
        else:
            self.num_skipped_steps[name] += 1
        optimizer.zero_grad()
        return OptimizerStepResult(float(norm), not is_finite, learning_rate)

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
        """Writes a checkpoint; see `StrategyBase.save_ckpt`."""
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
        write_checkpoint(request, lambda folder: self._write(found, folder))

    def _write(self, found: PreparedModel, folder: Path) -> None:
        tensors = self.unwrap_model(found).state_dict()
        # Tied tensors share storage, which safetensors refuses.
        save_file({k: v.detach().cpu().clone() for k, v in tensors.items()}, folder / MODEL_FILE)
        if found.optimizer is not None:
            torch.save(found.optimizer.state_dict(), folder / OPTIMIZER_FILE)
        if found.scheduler is not None:
            torch.save(found.scheduler.state_dict(), folder / SCHEDULER_FILE)

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
        """Reads a checkpoint; see `StrategyBase.load_ckpt`."""
        found = self._resolve(model, optimizer, scheduler)
        checkpoint = find_checkpoint(Path(load_dir), tag)
        folder = checkpoint.path
        tensors = load_file(folder / MODEL_FILE)
        self.unwrap_model(found).load_state_dict(tensors, strict=load_module_strict)
        for wanted, file, target in (
            (load_optimizer_states, OPTIMIZER_FILE, found.optimizer),
            (load_lr_scheduler_states, SCHEDULER_FILE, found.scheduler),
        ):
            if wanted and not load_module_only and target is not None:
                if not (folder / file).is_file():
                    raise FileNotFoundError(
                        f"{folder} has no {file}: it was saved without; load it with "
                        "load_module_only=True"
                    )
                target.load_state_dict(torch.load(folder / file, weights_only=True))
        if not load_module_only:
            checkpoint.restore_rng(0)
        self._mark_engine_stale()
        return str(folder), checkpoint.client_state()

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


def _refuse(kwargs: Mapping[str, object], method: str) -> None:
    if kwargs:
        raise TypeError(f"{method} got unknown options: {', '.join(sorted(kwargs))}")


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
