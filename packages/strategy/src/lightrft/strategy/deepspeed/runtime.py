"""The one place that imports DeepSpeed: its start, its engines, its gathered parameters."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightrft.engines.libraries import check_library
from lightrft.engines.process_state import environment, replaced_environment
from lightrft.strategy.checkpoints.files import FileWriter
from lightrft.strategy.distributed.collectives import ALONE, nonfinite_names, require_finite
from lightrft.strategy.weight_sync.parameter_source import FlatRange, chunk_ranges

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def start(timeout: timedelta) -> None:
    """Let DeepSpeed use the process group that exists; idempotent."""
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed detects it with a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    check_library("deepspeed")
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed still calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning
    )
    if get_accelerator().device_name() == "cpu":
        # An all-reduce over shared memory that training never calls; compiling it takes a minute
        # or two at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    deepspeed.comm.init_distributed(
        dist_backend=dist.get_backend(), timeout=timeout, verbose=False, dist_init_required=False
    )


def _import_muon_uncompiled() -> None:
    """Spare every rank the seconds that importing torch's compiler takes.

    DeepSpeed checks whether each optimizer is its Muon. That module compiles functions, unused
    here, as soon as it is imported.
    """
    compile_function = torch.compile
    torch.compile = lambda *_, **__: lambda function: function  # type: ignore[assignment]
    try:
        with contextlib.suppress(ImportError):  # other versions keep it elsewhere
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compile_function


def stop() -> None:
    """Forget the process group, so that another strategy can start one."""
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()


def initialize(
    module: nn.Module, config: Mapping[str, object], optimizer: Optimizer | None = None
) -> nn.Module:
    """Return a DeepSpeed engine around a module.

    Buffers keep their dtype: DeepSpeed would round rotary frequencies to bfloat16.

    Args:
        module: Module, changed in place.
        config: See `engine_config`.
        optimizer: Optimizer for training; None for a model that is only evaluated.
    """
    import deepspeed

    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    # DeepSpeed asks for the variable, which only a launcher sets.
    # It also prints the memory in use, whatever the level of its log.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with environment({"LOCAL_RANK": str(index)}), quiet:
        engine: nn.Module = deepspeed.initialize(
            model=module, optimizer=optimizer, config=dict(config), dist_init_required=False
        )[0]
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
    for parameter in module.parameters():
        _clear_padding(parameter)
    _accept_any_output(engine, module)
    return engine


def _accept_any_output(engine: nn.Module, module: nn.Module) -> None:
    """Let the module return dataclasses that are registered as pytrees.

    The engine hooks the tensors of tuples, lists and dicts only, and without these hooks its
    backward pass is not prepared. So the module's output reaches it as a flat list.
    """
    specs: list[pytree.TreeSpec] = []
    is_inside = [False]

    def begin(_: nn.Module, __: tuple[object, ...]) -> None:
        is_inside[0] = True

    def flatten(_: nn.Module, __: tuple[object, ...], output: object) -> object:
        if not is_inside[0]:
            return output
        leaves, spec = pytree.tree_flatten(output)
        specs.append(spec)
        return leaves

    def restore(_: nn.Module, __: tuple[object, ...], output: object) -> object:
        is_inside[0] = False
        return pytree.tree_unflatten(cast("list[object]", output), specs.pop())

    engine.register_forward_pre_hook(begin)
    module.register_forward_hook(flatten)
    engine.register_forward_hook(restore)


def as_engine(module: nn.Module) -> DeepSpeedEngine:
    """Return the module as a DeepSpeed engine.

    Raises:
        ValueError: It is none.
    """
    if not is_engine_module(module):
        raise ValueError(
            f"{type(module).__name__} is no DeepSpeed engine: call strategy.prepare((model, "
            "optimizer, scheduler)), or prepare_models_and_optimizers, first"
        )
    return module


def is_engine_module(module: nn.Module) -> bool:
    """Return whether the module is a DeepSpeed engine."""
    import deepspeed

    return isinstance(module, deepspeed.DeepSpeedEngine)


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether stage 3 (or `zero.Init`) has divided this parameter over ranks."""
    return "ds_id" in vars(parameter)


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, in stage 3 with its padding."""
    part: Tensor = vars(parameter)["ds_tensor"] if is_partitioned(parameter) else parameter
    return part.detach()


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(vars(parameter)["ds_shape"] if is_partitioned(parameter) else parameter.shape)


@contextmanager
def gathered(parameters: Sequence[Tensor], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Gather partitioned parameters while the body runs; keep changes of `modifier_rank`."""
    import deepspeed

    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank):
        yield


def set_full_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter and its float32 master, if it has one. Collective for partitioned ones.

    Args:
        parameter: Parameter of a module inside an engine, or of a plain module.
        value: Full value, equal on all ranks.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    with torch.no_grad(), gathered([parameter], modifier_rank=0):
        parameter.data.copy_(value)
    master = value.to(parameter.device, torch.float32)
    if not is_partitioned(parameter):
        safe_set_full_fp32_param(parameter, master)
    elif "_z3_optimizer" in vars(parameter):
        # DeepSpeed cuts the value into equal parts, so the last one needs its padding.
        from deepspeed.utils import safe_set_local_fp32_param

        safe_set_local_fp32_param(parameter, _partition_of(parameter, master))


def full_master(parameter: nn.Parameter) -> Tensor | None:
    """Return the full float32 master of a trained parameter; None if frozen. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return None
    master: Tensor | None = safe_get_full_fp32_param(parameter)
    return None if master is None else master.view(full_shape(parameter))


def link_moments(engine: DeepSpeedEngine) -> None:
    """Let `full_moment` read Adam's current states.

    Stages 1 and 2 of DeepSpeed link them once, after the first step of the first group; states of
    other groups are missing.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero = vars(engine.optimizer)
    for group, partition in zip(
        zero.get("bit16_groups", ()), zero.get("single_partition_of_fp32_groups", ()), strict=True
    ):
        lazy_init_hp_params_optimizer_state(group, partition, zero["optimizer"].state)


def full_moment(parameter: nn.Parameter, key: str) -> Tensor | None:
    """Return a full state of Adam for a trained parameter. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    value: Tensor | None = safe_get_full_optimizer_state(parameter, key)
    return None if value is None else value.view(full_shape(parameter))


def discard_gradients(engine: DeepSpeedEngine) -> None:
    """Forget the micro-batches of an abandoned optimizer step."""
    engine.zero_grad()
    if engine.zero_optimization_stage() == 0:
        return
    zero = engine.optimizer
    zero.zero_grad(set_to_none=True)
    if hasattr(zero, "clear_hp_grads"):  # stage 1 in bfloat16 has a separate optimizer
        zero.clear_hp_grads()
        return
    state = vars(zero)
    # Stage 3 copies instead of adding where this counter is 0; stages 1 and 2 count from -1.
    is_stage_3 = engine.zero_optimization_partition_weights()
    zero.micro_step_id = 0 if is_stage_3 else -1
    if is_stage_3:
        state["_epilogue_ran_this_backward"] = False
    for name in () if is_stage_3 else ("averaged_gradients", "all_grad_tensors"):
        for group in state[name]:
            state[name][group] = None


def partitions(parameter: Tensor) -> tuple[ProcessGroup, tuple[FlatRange, ...]]:
    """Return the ranks of a partitioned parameter, and each one's range of the flat tensor.

    Partitions are equal: the last ones are padded.
    """
    group: ProcessGroup = vars(parameter)["ds_process_group"]
    return group, chunk_ranges((math.prod(full_shape(parameter)),), dist.get_world_size(group))


def _partition_of(parameter: nn.Parameter, value: Tensor) -> Tensor:
    group, ranges = partitions(parameter)
    start, stop = ranges[dist.get_rank(group)]
    padded = value.new_zeros(local_part(parameter).numel())
    padded[: stop - start] = value.flatten()[start:stop]
    return padded


def _clear_padding(parameter: nn.Parameter) -> None:
    """Set stage 3's padding to 0: it holds whatever was in memory.

    It enters no result, but it is part of checkpoints, and equal states should be equal files.
    """
    if not is_partitioned(parameter):
        return
    partition = local_part(parameter)
    group, ranges = partitions(parameter)
    start, stop = ranges[dist.get_rank(group)]
    num_local = stop - start
    if num_local == partition.numel():
        return
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    partition.view(-1)[num_local:] = 0
    if "_z3_optimizer" in vars(parameter):
        master = safe_get_local_fp32_param(parameter).clone()
        master.view(-1)[num_local:] = 0
        safe_set_local_fp32_param(parameter, master)


@contextmanager
def weights_only_loading() -> Iterator[None]:
    """Make every `torch.load` inside refuse pickled code, also where DeepSpeed asks for it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [LossScaler, ZeroStageEnum, fragment_address]
    with replaced_environment({FORCE_WEIGHTS_ONLY: "1"}), torch.serialization.safe_globals(known):
        yield


@contextmanager
def saving_by(engine: DeepSpeedEngine, files: FileWriter) -> Iterator[None]:
    """Pass the files that the engine saves inside to our writer.

    Raises:
        NonFiniteError: Some files hold values that are not finite.
    """
    by_deepspeed = engine.checkpoint_engine
    names: list[str] = []

    def save(state_dict: object, path: str) -> None:
        # Only recorded: the engine's ranks wait for each other before they return.
        names.extend(nonfinite_names(_trained_tensors(state_dict)))
        files.pickled(Path(path), state_dict, is_zip=by_deepspeed.zipfile_serialization)

    vars(by_deepspeed)["save"] = save
    try:
        yield
    finally:
        del vars(by_deepspeed)["save"]
    require_finite(names, what="the checkpoint is", group=ALONE)


def _trained_tensors(state: object) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of tensors that DeepSpeed saves, without the module's buffers."""
    buffers = state.get("buffer_names", ()) if isinstance(state, dict) else ()
    for keys, value in pytree.tree_leaves_with_path(state):
        names = [str(getattr(key, "key", getattr(key, "idx", key))) for key in keys]
        if isinstance(value, Tensor) and names[-1] not in buffers:
            yield "/".join(names), value


def read_full_weights(folder: str, tag: str) -> dict[str, Tensor]:
    """Return full float32 weights of a ZeRO checkpoint, whatever number of ranks wrote it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with weights_only_loading():
        state: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    return state
