"""Parameters that an engine holds in this process: manifest, updates, release and hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightrft.engines.engine_weights import EngineWeights
from lightrft.engines.types import EngineParameter

if TYPE_CHECKING:
    from lightrft.kernels.weight_bucket.layout import WeightPiece


class ParameterStore(EngineWeights):
    """A named set of tensors that a trainer rewrites.

    Args:
        parameters: Checkpoint name -> tensor. A tensor that appears under several names counts
            once, under the first.
        engine_name: Names the engine in errors.

    Attributes:
        tensors: The tensors that own their storage, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], engine_name: str) -> None:
        self._tied = tied_names(parameters.items())
        self.tensors = {n: p for n, p in parameters.items() if n not in self._tied}
        self._shapes = {name: tuple(p.shape) for name, p in self.tensors.items()}
        self._devices = {name: p.device for name, p in self.tensors.items()}
        manifest = [
            EngineParameter(name, tuple(p.shape), p.dtype, tied_to=self._tied.get(name))
            for name, p in parameters.items()
        ]
        super().__init__(manifest, engine_name)
        self.is_aliased = False

    def begin(self) -> None:
        """Opens an update; storage shared with the trainer is replaced by copies first."""
        super().begin()
        if self.is_aliased:
            self._stop_sharing()

    @torch.no_grad()
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Writes pieces into storage; see `RolloutEngine.load_weights`."""
        self._require_resident("load_weights")
        if self.is_aliased:
            self._stop_sharing()
        for piece in pieces:
            self.accept(piece)
            flat = self.tensors[piece.name].data.view(-1)
            flat[piece.start : piece.start + piece.tensor.numel()].copy_(piece.tensor)

    def alias(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Takes the given tensors as storage if every one fits; else changes nothing."""
        if not self.is_resident or self.is_open:
            return False
        if set(tensors) - set(self.tensors) - set(self._tied):
            return False
        for name, parameter in self.tensors.items():
            given = tensors.get(name)
            if given is None or not _fits(given, parameter):
                return False
        for tied, name in self._tied.items():
            if tied in tensors and tensors[tied].data_ptr() != tensors[name].data_ptr():
                return False
        for name, parameter in self.tensors.items():
            parameter.data = tensors[name].detach()
        self.is_aliased = True
        self.unwritten.clear()
        return True

    def _stop_sharing(self) -> None:
        """Takes storage of its own again: that of the trainer is not to be written."""
        for parameter in self.tensors.values():
            parameter.data = parameter.data.clone()
        self.is_aliased = False

    def release(self, level: int) -> None:
        """Level 1 moves weights to the host, level 2 frees them; aliased ones stay untouched."""
        if self.is_aliased:
            return
        for name, parameter in self.tensors.items():
            if level == 2:
                parameter.data = parameter.data.new_empty(0)
                self.unwritten.add(name)
            elif parameter.device.type != "cpu":
                parameter.data = parameter.data.to("cpu")
        self.is_resident = False

    def restore(self) -> None:
        """Takes memory back; weights freed by level 2 stay unwritten."""
        if self.is_resident:
            return
        for name, parameter in self.tensors.items():
            if tuple(parameter.shape) == self._shapes[name]:
                parameter.data = parameter.data.to(self._devices[name])
            else:
                parameter.data = torch.empty(
                    self._shapes[name], dtype=parameter.dtype, device=self._devices[name]
                )
        self.is_resident = True

    def _stored_hashes(self, names: Sequence[str]) -> list[int]:
        from lightrft.kernels import hash_tensors

        return hash_tensors([self.tensors[name].detach() for name in names])

    def shared_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """See `RolloutEngine.shared_names`; compares addresses, not what was agreed on."""
        self._require_resident("shared_names")
        return frozenset(
            name
            for name, given in tensors.items()
            if (own := self.tensors.get(self._tied.get(name, name))) is not None
            and own.numel() > 0
            and own.data_ptr() == given.data_ptr()
            and own.stride() == given.stride()
            and _fits(given, own)
        )


def is_full_tensor(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor holds all elements of a parameter of this shape in this process.

    Sharded parameters are of another type (DTensor) or have an empty local shape (ZeRO-3).
    """
    is_plain = type(tensor.data) is torch.Tensor
    return is_plain and tensor.shape == shape and tensor.device.type != "meta"


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, also where ZeRO-3 has emptied the tensor itself."""
    # DeepSpeed keeps it as an attribute of the parameter.
    shape: torch.Size = vars(parameter).get("ds_shape", parameter.shape)
    return shape


def tied_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """For each further name of a shared parameter, the first name."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in named:
        first_name = first_names.setdefault(id(parameter), name)
        if first_name != name:
            tied[name] = first_name
    return tied


def _fits(given: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        given.shape == parameter.shape
        and given.dtype == parameter.dtype
        and given.device == parameter.device
    )
