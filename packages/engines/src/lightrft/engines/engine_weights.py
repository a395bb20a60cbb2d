"""An engine's parameters during updates: what every kind of storage has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch

from lightrft.engines.types import EngineParameter, WeightPiece
from lightrft.engines.weight_transaction import WeightTransaction


class EngineWeights(ABC):
    """A named set of parameters that a trainer rewrites.

    Args:
        manifest: Every parameter, in checkpoint names.
        engine_name: Names the engine in errors.
        unwritten: Names that hold no weights yet.
    """

    def __init__(
        self,
        manifest: Sequence[EngineParameter],
        engine_name: str,
        *,
        unwritten: Iterable[str] = (),
    ) -> None:
        self.manifest = tuple(manifest)
        self.transaction = WeightTransaction(engine_name, self.manifest, unwritten=unwritten)
        self.is_resident = True
        self._engine_name = engine_name

    @property
    def owners(self) -> set[str]:
        """The parameters with storage of their own."""
        return {p.name for p in self.manifest if p.tied_to is None}

    def begin(self) -> None:
        """Opens an update."""
        self.transaction.begin()

    @abstractmethod
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """See `RolloutEngine.load_weights`."""

    def finish(self) -> None:
        """Closes an update; raises if a parameter is incomplete."""
        self.transaction.finish()

    def release(self, level: int) -> None:
        """Weights sleep; those of level 2 must be written again."""
        self.is_resident = False
        if level == 2:
            self.transaction.unwritten.update(self.owners)

    def restore(self) -> None:
        """Weights are awake; those of level 2 stay unwritten."""
        self.is_resident = True

    def alias(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """See `RolloutEngine.alias_weights`."""
        del tensors
        return False

    @abstractmethod
    def hashes(self, names: Sequence[str] | None) -> dict[str, int]:
        """See `RolloutEngine.hash_parameters`."""

    def _require_resident(self, method: str) -> None:
        if not self.is_resident:
            raise RuntimeError(
                f"the weights of the {self._engine_name} engine sleep; call wake_up(('weights',)) "
                f"before {method}()"
            )


class AssembledWeights(EngineWeights):
    """Collects pieces into whole parameters and hands those to a backend.

    A group of parameters that the backend fuses is handed over once, when all of it is there.

    Args:
        manifest, engine_name, unwritten: See `EngineWeights`.
        device: Where copies are assembled; None is that of the pieces. A backend that keeps no
            reference is given whole pieces as they are.
    """

    def __init__(
        self,
        manifest: Sequence[EngineParameter],
        engine_name: str,
        *,
        unwritten: Iterable[str] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__(manifest, engine_name, unwritten=unwritten)
        self._parameters = {parameter.name: parameter for parameter in manifest}
        self._device = device
        self._is_updating = False
        self._assembled: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self._failed: set[str] = set()

    @abstractmethod
    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """Gives whole parameters to the backend; the first call of an update opens its own."""

    @abstractmethod
    def _end_update(self) -> None:
        """Ends the backend's own update."""

    def begin(self) -> None:
        """Opens an update; the backend hears of it when the first parameter is whole."""
        super().begin()
        self._forget()
        self._failed = set()

    @torch.no_grad()
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Takes pieces; parameters that are complete go to the backend together."""
        self._require_resident("load_weights")
        ready: dict[str, torch.Tensor] = {}
        for piece in pieces:
            parameter = self.transaction.accept(piece)
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
            # Until the backend has taken them, these may hold anything.
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
        # Overlapping pieces make this too small, which `WeightTransaction.finish` reports.
        self._missing[name] -= piece.tensor.numel()

    @torch.no_grad()
    def finish(self) -> None:
        """Closes the update in the backend; raises if a parameter or group is incomplete."""
        self._forget()
        if not self.transaction.is_open:
            self.transaction.finish()
        try:
            if self._is_updating:
                self._end_update()
        except BaseException:
            self._failed |= self.owners
            raise
        finally:
            self._is_updating = False
            try:
                self.transaction.finish()
            finally:
                self.transaction.unwritten.update(self._failed)

    def _forget(self) -> None:
        self._assembled.clear()
        self._missing.clear()
