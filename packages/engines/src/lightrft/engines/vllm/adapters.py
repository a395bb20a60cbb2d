"""Adapters in vLLM's buffers: one set in its only slot, written and read in place."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightrft.engines.adapters import FIRST, SECOND
from lightrft.engines.types import AdapterShape, EngineConfig, EngineParameter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_BASE = ".base_layer"
# vLLM identifies adapters by their number and, in its prefix cache, by their name. Both can stay
# the same, since every update ends with empty caches. Nothing is read from the path.
_NUMBER, _NAME, _PATH = 1, "policy", "/in/memory"


def adapter_arguments(config: EngineConfig) -> dict[str, object]:
    """Return keyword arguments of `vllm.LLM` for an engine with adapters.

    Raises:
        ValueError: vLLM cannot hold the adapters.
    """
    from vllm.config.lora import MaxLoRARanks

    if config.adapters is None:
        return {}
    ranks = [rank for rank in typing.get_args(MaxLoRARanks) if rank >= config.adapters.rank]
    problems = {
        f"adapters of rank {config.adapters.rank}": not ranks,
        f"engine_tp_size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        "no checkpoint to read the base from": not config.model_path,
    }
    obstacles = [problem for problem, applies in problems.items() if applies]
    if obstacles:
        raise ValueError(
            f"lora_sync adapter: the vllm engine cannot hold adapters with {', '.join(obstacles)}: "
            "give lora_sync merged"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks), "lora_dtype": "auto"}


def adapter_request() -> LoRARequest:
    """Return the object that makes a request use the adapters."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, _PATH)


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return vLLM's modules by name, with the wrapped layers in place of adapter wrappers."""
    named = model.named_modules(remove_duplicate=False)
    return {name.replace(_BASE, ""): module for name, module in named}


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of a vLLM module that hold a linear layer of the checkpoint.

    Args:
        module_name: Name of the module; "" if there is none.
        start, stop: Range of the module's rows.
    """

    module_name: str
    start: int
    stop: int

    def slices(self, seconds: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the slices that are the rows, or () if there are none.

        Args:
            seconds: B of each slice, [slots, 1, rows of the slice, rank].
        """
        stops = [0, *accumulate(int(each.shape[2]) for each in seconds)]
        if self.start not in stops or self.stop not in stops:
            return ()
        return tuple(range(stops.index(self.start), stops.index(self.stop)))


class AdapterBuffers:
    """A and B of every layer, in the buffers with which vLLM multiplies.

    vLLM splits the rows of a layer that it fuses, and of some others, into slices with an A and a B
    each. A layer of the checkpoint lies in one slice or in several, which have equal A.

    Args:
        runner: vLLM's runner of the model.
        adapters: Rank and layers of the adapters.
        targets: Checkpoint name of a layer -> its place.

    Attributes:
        tensors: Parameter -> views of vLLM's buffers, A [rank, in] and B [rows of the slice, rank].

    Raises:
        ValueError: vLLM has no adapter for a layer.
    """

    def __init__(
        self, runner: object, adapters: AdapterShape, targets: Mapping[str, LayerRows]
    ) -> None:
        manager = runner.lora_manager  # type: ignore[attr-defined]
        # Marks the slot as used for requests; its contents are overwritten.
        manager.add_dummy_lora(adapter_request(), adapters.rank)
        slots = manager._adapter_manager
        slots.activate_adapter(_NUMBER)
        self._slot: int = slots.lora_index_to_id.index(_NUMBER)
        for module in slots.modules.values():
            module.reset_lora(self._slot)
        self._slots = slots
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}
        for layer in adapters.layers:
            rows = targets[layer]
            module = slots.modules.get(rows.module_name)
            slices = () if module is None else rows.slices(module.lora_b_stacked)
            if module is None or not slices:
                raise ValueError(
                    f"lora_sync adapter: vLLM has no adapter for {layer}: give lora_sync merged, "
                    "or target_modules without it"
                )
            a, b, rank = module.lora_a_stacked, module.lora_b_stacked, adapters.rank
            self.tensors[layer + FIRST] = tuple(a[each][self._slot, 0, :rank] for each in slices)
            self.tensors[layer + SECOND] = tuple(
                b[each][self._slot, 0, :, :rank] for each in slices
            )

    @property
    def manifest(self) -> tuple[EngineParameter, ...]:
        """Parameters of the adapters."""
        return tuple(
            EngineParameter(name, tuple(self._whole(name).shape), parts[0].dtype)
            for name, parts in self.tensors.items()
        )

    def _whole(self, name: str) -> torch.Tensor:
        """Return a parameter as the trainer has it; a differing A if they are not equal."""
        parts = self.tensors[name]
        if name.endswith(SECOND):
            return torch.cat(parts)
        return next((part for part in parts[1:] if not torch.equal(part, parts[0])), parts[0])

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy whole parameters to vLLM's buffers.

        Raises:
            ValueError: A parameter is no adapter.
        """
        for name, tensor in tensors.items():
            if name not in self.tensors:
                raise ValueError(
                    f"a vllm engine with adapters keeps the base of its checkpoint: got {name}"
                )
            parts = self.tensors[name]
            is_split = name.endswith(SECOND)
            num_rows = [len(part) for part in parts]
            pieces = torch.split(tensor, num_rows) if is_split else [tensor] * len(parts)
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)

    def hashes(self, names: Sequence[str]) -> list[int]:
        """Return the hashes of parameters in vLLM's buffers.

        Raises:
            RuntimeError: vLLM has put other adapters into the slot.
        """
        from lightrft.kernels import hash_tensors

        if self._slots.lora_index_to_id[self._slot] != _NUMBER:
            raise RuntimeError("vLLM has put other adapters into the slot of the policy's")
        return hash_tensors([self._whole(name).contiguous() for name in names])
