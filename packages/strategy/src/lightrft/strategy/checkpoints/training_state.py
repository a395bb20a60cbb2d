"""Model and optimizer as files, shard by shard where they are sharded."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.engines.nf4 import names_in_files, quantized_layers
from lightrft.strategy.checkpoints.files import FileWriter, load_state, save_state
from lightrft.strategy.checkpoints.gathered_model import WeightFiles, check_names
from lightrft.strategy.checkpoints.shard_files import (
    ShardReader,
    full_value,
    own_shards,
    write_shards,
)
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.optimizers import SCALE, optimizer_parameters
from lightrft.strategy.weight_sync.parameter_source import (
    local_rows,
    reshard_modules,
    tied_parameter_names,
)

MODEL_FOLDER = "model"
OPTIMIZER_FOLDER = "optimizer"
GROUPS_NAME = "optimizer_groups"


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, sharing storage; tied ones once."""
    reshard_modules(module)
    tied = tied_parameter_names(module)
    return {name: value for name, value in module.state_dict().items() if name not in tied}


def _kept_state(module: nn.Module) -> dict[str, Tensor]:
    """Return what checkpoints hold: what is trained where the base has 4 bits, else everything."""
    state = module_state(module)
    if not quantized_layers(module):
        return state
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def save_module(folder: Path, module: nn.Module, files: FileWriter, *, rank: int) -> None:
    """Write this rank's shards of a model."""
    shards = own_shards(_kept_state(module), rank)
    buffers = dict(module.named_buffers())
    write_shards(folder / MODEL_FOLDER, shards, files, rank=rank, buffers=buffers)


@torch.no_grad()
def load_module(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Read shards into a model, whatever number of ranks wrote them.

    Raises:
        CheckpointError: With `strict`, if names are missing or unexpected.
        CheckpointError: A shape differs.
    """
    reader, state = ShardReader(folder / MODEL_FOLDER), _kept_state(module)
    available = reader.names - set(tied_parameter_names(module))
    for name in check_names(set(state), available, source=str(folder), strict=strict):
        reader.read_into(name, *local_rows(state[name].detach()), tuple(state[name].shape))


@torch.no_grad()
def load_full_weights(
    path: Path, module: nn.Module, *, strict: bool, names: set[str] | None = None
) -> None:
    """Read a Hugging Face checkpoint; each rank reads only the rows it holds, a few at a time.

    Args:
        path: A file or folder.
        module: The wrapped module.
        strict: Whether missing and unexpected names are errors.
        names: Required names, read with any buffers that are there; None reads everything.

    Raises:
        FileNotFoundError: There are no weights.
        CheckpointError: A shape differs, or with `strict` names are missing or unexpected.
    """
    files, state = WeightFiles(path, module), module_state(module)
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(module).items()}
    available = files.names - set(tied_parameter_names(module))
    wanted = set(names_in_files(module, state if names is None else names))
    if names is not None:
        wanted |= available.intersection(name for name, _ in module.named_buffers())
        available &= wanted
    for name in sorted(check_names(wanted, available, source=str(path), strict=strict)):
        if name in layers:
            # Imported here: few models have such layers.
            from lightrft.strategy.nf4 import fill

            weight = torch.empty(layers[name].shape)
            files.read_into(name, weight, 0, len(weight), layers[name].shape)
            fill(layers[name], weight)
        else:
            target = state[name]
            files.read_into(name, *local_rows(target.detach()), tuple(target.shape))


def save_optimizer(
    folder: Path, module: nn.Module, optimizer: Optimizer, files: FileWriter, *, rank: int
) -> None:
    """Write this rank's shards of the optimizer's states, and the groups' numbers."""
    shards = own_shards(dict(_states(module, optimizer)), rank)
    write_shards(folder / OPTIMIZER_FOLDER, shards, files, rank=rank)
    if rank == 0:
        names = _parameter_names(module)
        groups = [
            {
                "names": [names[id(parameter)] for parameter in group["params"]],
                "numbers": {key: value for key, value in group.items() if key != "params"},
            }
            for group in optimizer.param_groups
        ]
        save_state(folder / GROUPS_NAME, {"groups": groups}, files)


@torch.no_grad()
def load_optimizer(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Read states and the groups' numbers.

    Raises:
        CheckpointError: There is no optimizer in the checkpoint, or its groups hold other
            parameters.
    """
    if not (folder / f"{GROUPS_NAME}.json").is_file():
        raise CheckpointError(
            f"{folder} holds no optimizer: load it with load_optimizer_states=False"
        )
    saved = load_state(folder / GROUPS_NAME)["groups"]
    names = _parameter_names(module)
    local_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if not isinstance(saved, list) or [group["names"] for group in saved] != local_names:
        raise CheckpointError(
            f"{folder} holds an optimizer of other parameters or other groups: train the same "
            "parts as the run that was saved, with learning_rate_factors of the same parts (their "
            "numbers may change), or load with load_optimizer_states=False"
        )
    reader = ShardReader(folder / OPTIMIZER_FOLDER)
    keys: dict[str, list[str]] = {}
    for stored in sorted(reader.names):
        key, name = stored.split("/", 1)
        keys.setdefault(name, []).append(key)
    for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
        group.update(saved_group["numbers"])
        for parameter in group["params"]:
            name = names[id(parameter)]
            state: dict[str, Tensor] = {}
            for key in keys.get(name, []):
                stored = f"{key}/{name}"
                dtype = reader.dtype_of(stored)
                if key.endswith(SCALE):
                    state[key] = torch.zeros(
                        reader.shape_of(stored), dtype=dtype, device=parameter.device
                    )
                else:
                    state[key] = _empty_state(key, parameter, group, dtype)
                reader.read_into(stored, *local_rows(state[key]), tuple(state[key].shape))
            optimizer.state[parameter] = state


def _empty_state(
    key: str, parameter: Tensor, group: Mapping[str, object], dtype: torch.dtype
) -> Tensor:
    if key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # torch's AdamW keeps its counter on the CPU unless a fused kernel reads it.
    is_on_device = bool(group.get("fused")) or bool(group.get("capturable"))
    return torch.zeros((), dtype=dtype, device=parameter.device if is_on_device else "cpu")


def _parameter_names(module: nn.Module) -> dict[int, str]:
    reshard_modules(module)
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _states(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield `KEY/NAME` and value of every state of a parameter."""
    names = _parameter_names(module)
    for parameter in optimizer_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key}/{names[id(parameter)]}", value


def full_optimizer_states(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield `KEY/NAME` and full value of every state of a parameter. Collective if sharded."""
    for name, value in _states(module, optimizer):
        if isinstance(value, torch.Tensor):
            yield name, full_value(value)


def group_names(module: nn.Module, optimizer: Optimizer) -> list[dict[str, object]]:
    """Return names of the parameters, and numbers, of each group.

    A backend may have replaced the optimizer's parameters by flat tensors. Then all trained
    parameters are one group.
    """
    names = _parameter_names(module)
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    groups: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        has_names = {id(parameter) for parameter in group["params"]} <= set(names)
        has_names = has_names and bool(group["params"])
        numbers = {k: v for k, v in group.items() if isinstance(v, bool | int | float | tuple)}
        group_names = (
            [names[id(parameter)] for parameter in group["params"]] if has_names else trained
        )
        groups.append({"names": group_names, "numbers": numbers})
        if not has_names:
            break
    return groups
