"""Parameters of an engine: their updates, and their storage in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from lightrft.engines.types import EngineParameter, tied_names

if TYPE_CHECKING:
    from lightrft.kernels.weight_bucket.layout import WeightPiece


class StaleEngineError(RuntimeError):
    """Error for a call of `generate` while the engine's weights are not the trainer's."""


class EngineWeights(ABC):
    """Named set of parameters that a trainer rewrites.

    Follows begin / load... / finish / reset and refuses calls that would leave mixed weights.

    Args:
        manifest: All parameters, under checkpoint names.
        engine_name: Name of the engine in errors.

    Attributes:
        unwritten: Names of parameters that hold no weights yet.
    """

    def __init__(self, manifest: Sequence[EngineParameter], engine_name: str) -> None:
        self.manifest = tuple(manifest)
        self.unwritten: set[str] = set()
        self.is_resident = True
        self._engine_name = engine_name
        self._parameters = {parameter.name: parameter for parameter in self.manifest}
        self._phase: Literal["settled", "open", "caches"] = "settled"
        self._ranges: dict[str, list[tuple[int, int]]] = {}

    @property
    def owners(self) -> set[str]:
        """Names of the parameters that do not share another's storage."""
        return {p.name for p in self.manifest if p.tied_to is None}

    @property
    def is_open(self) -> bool:
        """Return whether an update has begun and is not finished."""
        return self._phase == "open"

    def begin(self) -> None:
        """Open an update.

        Raises:
            RuntimeError: An update is open already.
        """
        if self.is_open:
            raise RuntimeError(
                f"a weight update of the {self._engine_name} engine is open already; "
                "call finish_weight_update() before the next begin_weight_update()"
            )
        self._phase = "open"
        self._ranges = {}

    def accept(self, piece: WeightPiece) -> EngineParameter:
        """Check one piece against the manifest and record its range as written.

        Returns:
            The parameter that the piece belongs to.

        Raises:
            RuntimeError: No update is open.
            KeyError: The name is unknown, or shares the storage of another parameter.
            ValueError: Shape, dtype or range differ from the manifest.
        """
        if not self.is_open:
            raise RuntimeError(
                f"no weight update of the {self._engine_name} engine is open; "
                "call begin_weight_update() before load_weights()"
            )
        parameter = self._parameters.get(piece.name)
        if parameter is None:
            raise KeyError(
                f"the {self._engine_name} engine has no parameter {piece.name!r}; "
                "names must be those of parameter_manifest()"
            )
        if parameter.tied_to is not None:
            raise KeyError(
                f"parameter {piece.name!r} shares the storage of {parameter.tied_to!r}; "
                "send that one alone"
            )
        _check_piece(piece, parameter)
        stop = piece.start + piece.tensor.numel()
        self._ranges.setdefault(piece.name, []).append((piece.start, stop))
        return parameter

    def finish(self) -> None:
        """Close the update; caches must still be reset.

        Raises:
            RuntimeError: No update is open.
            ValueError: Parameters were written in part, or without the others of their fused
                engine tensor; the message names them. They stay unusable until written in full.
        """
        if not self.is_open:
            raise RuntimeError(
                f"no weight update of the {self._engine_name} engine is open; "
                "call begin_weight_update() before finish_weight_update()"
            )
        self._phase = "caches"
        covered = {name: _covered(ranges) for name, ranges in self._ranges.items()}
        incomplete = {}
        for name, num_covered in covered.items():
            parameter = self._parameters[name]
            absent = next((other for other in parameter.fused_with if other not in covered), None)
            if num_covered != parameter.numel:
                incomplete[name] = f"{name} ({num_covered} of {parameter.numel} elements)"
            elif absent is not None:
                incomplete[name] = f"{name} (without {absent} of the same engine tensor)"
            else:
                self.unwritten.discard(name)
        self._ranges = {}
        self.unwritten.update(incomplete)
        if incomplete:
            raise ValueError(
                "a weight update must write a parameter in full or not at all; written in part: "
                + ", ".join(incomplete.values())
            )

    @abstractmethod
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Implement `RolloutEngine.load_weights`."""

    def release(self, level: int) -> None:
        """Mark weights as asleep; after level 2 they must be written again."""
        self.is_resident = False
        if level == 2:
            self.unwritten.update(self.owners)

    def restore(self) -> None:
        """Mark weights as awake; after level 2 they stay unwritten."""
        self.is_resident = True

    def alias(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Implement `RolloutEngine.alias_weights`: not possible here."""
        del tensors
        return False

    def shared_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Implement `RolloutEngine.shared_names`: none here."""
        del tensors
        return frozenset()

    def hashes(self, names: Sequence[str] | None) -> dict[str, int]:
        """Return hashes for `RolloutEngine.hash_parameters`; a tied name has its owner's hash.

        Raises:
            KeyError: A name is unknown or cannot be read back.
            RuntimeError: The weights sleep or are being reloaded.
        """
        self._require_resident("hash_parameters")
        owners = {p.name: p.tied_to or p.name for p in self.manifest if p.verifiable}
        wanted = list(dict.fromkeys(owners.values()) if names is None else names)
        unknown = [name for name in wanted if name not in owners]
        if unknown:
            raise KeyError(
                f"the {self._engine_name} engine cannot read back parameter {unknown[0]!r}; names "
                "must be those of parameter_manifest() that are verifiable"
            )
        return dict(zip(wanted, self._stored_hashes([owners[n] for n in wanted]), strict=True))

    @abstractmethod
    def _stored_hashes(self, names: Sequence[str]) -> list[int]:
        """Return the hashes of untied parameters, from where the engine reads them."""

    def _require_resident(self, method: str) -> None:
        if not self.is_resident:
            raise RuntimeError(
                f"the weights of the {self._engine_name} engine sleep; call wake_up(('weights',)) "
                f"before {method}()"
            )

    def reset_caches(self) -> None:
        """Mark the caches as empty, which ends the update."""
        if self._phase == "caches":
            self._phase = "settled"

    def check_settled(self) -> None:
        """Raise unless the last update is over and every parameter holds weights.

        Raises:
            StaleEngineError: An update is open or weights are missing; the message says which.
        """
        prefix = f"the {self._engine_name} engine must not generate: "
        if self._phase == "open":
            raise StaleEngineError(
                prefix + "a weight update is open; call finish_weight_update() and reset_caches()"
            )
        if self._phase == "caches":
            raise StaleEngineError(
                prefix + "its caches hold activations of older weights; call reset_caches()"
            )
        if self.unwritten:
            raise StaleEngineError(
                prefix
                + f"{len(self.unwritten)} parameters hold no weights (first: "
                + f"{min(self.unwritten)}); call strategy.update_engine_weights(actor) first"
            )


class AssembledWeights(EngineWeights):
    """Parameters that are assembled from pieces and passed whole to a backend.

    A group of parameters that the backend fuses is passed at once, when it is complete.

    Args:
        manifest, engine_name: Parameters and name as in `EngineWeights`.
        device: Device where copies are assembled; None for that of the pieces. Then whole pieces
            are passed without a copy, which needs a backend that keeps no reference.
    """

    def __init__(
        self,
        manifest: Sequence[EngineParameter],
        engine_name: str,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(manifest, engine_name)
        self._device = device
        self._is_updating = False
        self._assembled: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self._failed: set[str] = set()

    @abstractmethod
    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """Pass whole parameters to the backend; the first call of an update opens the backend's."""

    @abstractmethod
    def _end_update(self) -> None:
        """End the backend's update."""

    def begin(self) -> None:
        """Open an update; the backend's begins when the first parameter is whole."""
        super().begin()
        self._forget()
        self._failed = set()

    @torch.no_grad()
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Assemble pieces; pass complete parameters to the backend together."""
        self._require_resident("load_weights")
        ready: dict[str, torch.Tensor] = {}
        for piece in pieces:
            parameter = self.accept(piece)
            if self._device is None and piece.is_whole:
                ready[piece.name] = piece.tensor.view(parameter.shape)
                continue
            self._assemble(piece, parameter.numel)
            group = (parameter.name, *parameter.fused_with)
            if all(self._missing.get(name, 1) <= 0 for name in group):
                for name in sorted(group):
                    ready[name] = self._assembled.pop(name).view(self._parameters[name].shape)
                    del self._missing[name]
        if ready:
            # Until the backend has loaded them, these may hold anything.
            self._failed |= ready.keys()
            self._hand_over(ready)
            self._failed -= ready.keys()

    def _assemble(self, piece: WeightPiece, numel: int) -> None:
        name = piece.name
        if name not in self._assembled:
            self._assembled[name] = torch.empty(
                numel, dtype=piece.tensor.dtype, device=self._device or piece.tensor.device
            )
            self._missing[name] = numel
        stop = piece.start + piece.tensor.numel()
        self._assembled[name][piece.start : stop].copy_(piece.tensor)
        # Overlapping pieces make this too small; `EngineWeights.finish` reports them.
        self._missing[name] -= piece.tensor.numel()

    @torch.no_grad()
    def finish(self) -> None:
        """Close the update in the backend; raise if a parameter or group is incomplete."""
        self._forget()
        if not self.is_open:
            super().finish()
        try:
            if self._is_updating:
                self._end_update()
        except BaseException:
            self._failed |= self.owners
            raise
        finally:
            self._is_updating = False
            try:
                super().finish()
            finally:
                self.unwritten.update(self._failed)

    def _forget(self) -> None:
        self._assembled.clear()
        self._missing.clear()


def _check_piece(piece: WeightPiece, parameter: EngineParameter) -> None:
    if tuple(piece.shape) != parameter.shape:
        raise ValueError(
            f"shape of {piece.name!r}: got {tuple(piece.shape)}, the engine holds {parameter.shape}"
        )
    if piece.tensor.dtype != parameter.dtype:
        raise ValueError(
            f"dtype of {piece.name!r}: got {piece.tensor.dtype}, the engine holds "
            f"{parameter.dtype}; cast before sending"
        )
    stop = piece.start + piece.tensor.numel()
    if piece.tensor.dim() != 1 or piece.start < 0 or stop > parameter.numel:
        raise ValueError(
            f"piece of {piece.name!r}: got {tuple(piece.tensor.shape)} elements from index "
            f"{piece.start}, expected a 1-D tensor within [0, {parameter.numel})"
        )


def _covered(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of elements in the union of half-open ranges."""
    num_covered = 0
    end = 0
    for start, stop in sorted(ranges):
        num_covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return num_covered


class ParameterStore(EngineWeights):
    """Named set of tensors that a trainer rewrites.

    Args:
        parameters: Checkpoint name -> tensor. A tensor under several names counts once, under
            the first.
        engine_name: Name of the engine in errors.

    Attributes:
        tensors: Untied tensors by name.
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
        self._shared: set[str] = set()

    @torch.no_grad()
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Write pieces into storage; see `RolloutEngine.load_weights`."""
        self._require_resident("load_weights")
        for piece in pieces:
            self.accept(piece)
            parameter = self.tensors[piece.name]
            if piece.name in self._shared:  # the trainer's storage must not be written
                parameter.data = parameter.data.clone()
                self._shared.remove(piece.name)
            flat = parameter.data.view(-1)
            flat[piece.start : piece.start + piece.tensor.numel()].copy_(piece.tensor)

    def alias(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Use the trainer's tensors as storage if all of them fit; otherwise change nothing."""
        if not self.is_resident or self.is_open:
            return False
        owners = {name: self._tied.get(name, name) for name in tensors}
        for name, owner in owners.items():
            parameter = self.tensors.get(owner)
            if parameter is None or not _fits(tensors[name], parameter):
                return False
            if owner not in tensors or tensors[name].data_ptr() != tensors[owner].data_ptr():
                return False
        for owner in owners.values():
            self.tensors[owner].data = tensors[owner].detach()
        self._shared.update(owners.values())
        self.unwritten -= self._shared
        return True

    def release(self, level: int) -> None:
        """Move weights to the host (level 1) or free them (level 2); keep shared ones."""
        separate = self.tensors.keys() - self._shared
        for name in separate:
            parameter = self.tensors[name]
            if level == 2:
                parameter.data = parameter.data.new_empty(0)
                self.unwritten.add(name)
            elif parameter.device.type != "cpu":
                parameter.data = parameter.data.to("cpu")
        self.is_resident = not separate

    def restore(self) -> None:
        """Take memory back; weights freed by level 2 stay unwritten."""
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
        from lightrft.kernels.weight_bucket.operations import hash_tensors

        return hash_tensors([self.tensors[name].detach() for name in names])

    def shared_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return names of the parameters with the trainer's storage, by comparing addresses."""
        self._require_resident("shared_names")
        return frozenset(
            name
            for name, tensor in tensors.items()
            if (parameter := self.tensors.get(self._tied.get(name, name))) is not None
            and parameter.numel() > 0
            and parameter.data_ptr() == tensor.data_ptr()
            and parameter.stride() == tensor.stride()
            and _fits(tensor, parameter)
        )


def is_full_tensor(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor holds all elements of a parameter in this process.

    Sharded parameters are of another type (DTensor) or have an empty local shape (ZeRO-3).
    """
    is_plain = type(tensor.data) is torch.Tensor
    return is_plain and tensor.shape == shape and tensor.device.type != "meta"


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter, even if ZeRO-3 has emptied the tensor."""
    # DeepSpeed keeps it as an attribute of the parameter.
    shape: torch.Size = vars(parameter).get("ds_shape", parameter.shape)
    return shape


def _fits(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        tensor.shape == parameter.shape
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
    )
