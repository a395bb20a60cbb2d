"""What every backend implements to train a model, and how micro-batches are counted."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightrft.strategy.accumulation import AccumulationState
from lightrft.strategy.distributed.context import DistributedContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightrft.strategy.optimizers import OptimizerStepResult
    from lightrft.strategy.prepared import AnyModel, Arguments, PreparedModel
    from lightrft.strategy.weight_sync.parameter_source import ParameterSource


class TrainingInterface(DistributedContext, ABC):
    """The abstract methods of a strategy; see `StrategyBase` for the arguments."""

    def __init__(
        self,
        seed: int,
        max_norm: float,
        micro_train_batch_size: int,
        train_batch_size: int,
        args: Arguments | None = None,
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self.time_steps: defaultdict[str, int] = defaultdict(int)
        self.num_skipped_steps: defaultdict[str, int] = defaultdict(int)
        self._accumulations: weakref.WeakKeyDictionary[Optimizer, AccumulationState] = (
            weakref.WeakKeyDictionary()
        )

    @abstractmethod
    def create_optimizer(self, model: AnyModel, **kwargs: object) -> Optimizer:
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
        self, loss: Tensor, model: AnyModel, optimizer: Optimizer, **kwargs: object
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
        model: AnyModel,
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
    def save_ckpt(  # noqa: PLR0913 - the published interface
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
        """Writes a checkpoint, then removes old ones that this run wrote.

        With `async_save` it returns when the state has been copied to host memory.

        Args:
            model: The model or a PreparedModel. Its optimizer and schedule are remembered.
            save_dir: Folder of all checkpoints.
            tag: Name of this one; None takes the next `global_step{n}`.
            max_num: Checkpoints to keep.
            max_mem: Megabytes that all kept checkpoints may take.
            client_state: Plain values (JSON) and tensors to store beside the model.
            save_latest: Whether loading without a tag finds this one.
            optimizer, scheduler: To store instead of the remembered ones.
            model_ema: The model's moving average, stored with it.

        Raises:
            CheckpointError: Saving failed on some rank, or the last save in the background did.
        """

    @abstractmethod
    def load_ckpt(  # noqa: PLR0913 - the published interface
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
        """Reads a checkpoint into the model, its optimizer and its schedule.

        Args:
            model: The model or a PreparedModel.
            load_dir: Folder of all checkpoints.
            tag: Which one; None takes the latest complete one.
            load_module_strict: Whether missing or unexpected weights are errors.
            load_optimizer_states, load_lr_scheduler_states: What else to read.
            load_module_only: Reads only weights, whatever the other options say.
            optimizer, scheduler: To read into instead of the remembered ones.
            model_ema: Gets the moving average that was stored with the model.

        Returns:
            (path of the checkpoint, client_state).

        Raises:
            FileNotFoundError: No complete checkpoint is there.
        """

    @abstractmethod
    def finish_saving(self) -> None:
        """Waits until every checkpoint is complete. Collective; done at the end as well.

        Raises:
            CheckpointError: A save in the background failed; the message names rank and error.
        """

    @abstractmethod
    def save_model(self, model: AnyModel, tokenizer: object | None, output_dir: str) -> None:
        """Writes the model in Hugging Face format (full weights, config, tokenizer)."""

    @abstractmethod
    def load_model(self, model: AnyModel, path: str, strict: bool = True) -> None:
        """Reads full weights in safetensors format into a prepared or bare model."""

    @abstractmethod
    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """This rank's shards of a model's parameters, in checkpoint names, for weight sync."""

    def accumulation_state(self, optimizer: Optimizer) -> AccumulationState:
        """How far this optimizer is inside its current step."""
        if optimizer not in self._accumulations:
            self._accumulations[optimizer] = AccumulationState(
                self.accumulated_gradient, sp_size=self.config.sp_size
            )
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
            if state.num_done != num_micro_batches:
                raise RuntimeError(
                    f"accumulation left after {state.num_done} of {num_micro_batches} "
                    "micro-batches: call backward and optimizer_step for each"
                )
        except BaseException:
            # What was accumulated must not leak into the next step.
            self._discard_gradients(optimizer)
            raise
        finally:
            del self._accumulations[optimizer]

    def _discard_gradients(self, optimizer: Optimizer) -> None:
        """Drops the gradients of an optimizer step that was given up."""
        optimizer.zero_grad()


def refuse_options(kwargs: Mapping[str, object], method: str) -> None:
    """Raises a TypeError that names the options a method does not have."""
    if kwargs:
        raise TypeError(f"{method} got unknown options: {', '.join(sorted(kwargs))}")
