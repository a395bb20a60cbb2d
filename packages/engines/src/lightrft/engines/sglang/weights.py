"""Weights of an SGLang engine: updates in its own sessions, whole tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from lightrft.engines.sglang.backend import Engine, flattened
from lightrft.engines.types import EngineParameter, WeightPiece
from lightrft.engines.weight_transaction import WeightTransaction


class SGLangWeights:
    """Assembles pieces into whole parameters and sends them to the scheduler process.

    Args:
        engine: The started engine.
        manifest: Its parameters, in checkpoint names.
        engine_name: Names the engine in errors.
        unwritten: Names that hold no weights yet.
    """

    def __init__(
        self,
        engine: Engine,
        manifest: Sequence[EngineParameter],
        engine_name: str,
        *,
        unwritten: Iterable[str] = (),
    ) -> None:
        self._engine = engine
        self.manifest = tuple(manifest)
        self._parameters = {parameter.name: parameter for parameter in manifest}
        self._engine_name = engine_name
        self.transaction = WeightTransaction(engine_name, manifest, unwritten=unwritten)
        self.is_resident = True
        self._is_in_session = False
        self._assembled: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}
        self._failed: set[str] = set()

    def owners(self) -> set[str]:
        """The parameters with storage of their own."""
        return {p.name for p in self.manifest if p.tied_to is None}

    def begin(self) -> None:
        """Opens an update; SGLang's session starts with the first whole parameter."""
        self.transaction.begin()
        self._assembled.clear()
        self._missing.clear()
        self._failed = set()

    @torch.no_grad()
    def load(self, pieces: Iterable[WeightPiece]) -> None:
        """Takes pieces; parameters that are complete go to SGLang in one message."""
        self._require_resident("load_weights")
        ready: list[tuple[str, torch.Tensor]] = []
        for piece in pieces:
            shape = self.transaction.accept(piece).shape
            if piece.tensor.numel() == self._parameters[piece.name].numel:
                ready.append((piece.name, piece.tensor.view(shape)))
                continue
            self._assemble(piece)
            if self._missing[piece.name] <= 0:
                ready.append((piece.name, self._assembled.pop(piece.name).view(shape)))
                del self._missing[piece.name]
        if ready:
            self._send(ready)

    def _assemble(self, piece: WeightPiece) -> None:
        numel = self._parameters[piece.name].numel
        if piece.name not in self._assembled:
            self._assembled[piece.name] = torch.empty(
                numel, dtype=piece.tensor.dtype, device=piece.tensor.device
            )
            self._missing[piece.name] = numel
        stop = piece.start + piece.tensor.numel()
        self._assembled[piece.name][piece.start : stop].copy_(piece.tensor)
        # Overlapping pieces make this too small, which `WeightTransaction.finish` reports.
        self._missing[piece.name] -= piece.tensor.numel()

    def _send(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        # Until SGLang has confirmed them, these may hold anything.
        names = {name for name, _ in named}
        self._failed |= names
        if not self._is_in_session:
            self._checked("begin_weight_update", self._engine.begin_weight_update)
            self._is_in_session = True
        payload = flattened(named)
        self._checked(
            "update_weights_from_tensor",
            lambda: self._engine.update_weights_from_tensor(
                [payload], load_format="flattened_bucket", flush_cache=False
            ),
        )
        self._failed -= names

    def _checked(self, name: str, call: Callable[[], tuple[bool, str]]) -> None:
        """SGLang returns its failures."""
        is_ok, message = call()
        if not is_ok:
            raise RuntimeError(f"sglang refused {name}: {message}")

    def finish(self) -> None:
        """Closes the update in SGLang; raises if a parameter is incomplete."""
        if not self.transaction.is_open:
            self.transaction.finish()
        try:
            if self._is_in_session:
                self._checked("end_weight_update", self._engine.end_weight_update)
        except BaseException:
            self._failed |= self.owners()
            raise
        finally:
            self._is_in_session = False
            try:
                self.transaction.finish()
            finally:
                self.transaction.unwritten.update(self._failed)

    def release(self, level: int) -> None:
        """Notes that weights sleep; those of level 2 must be written again."""
        self.is_resident = False
        if level == 2:
            self.transaction.unwritten.update(self.owners())

    def hashes(self, names: Sequence[str] | None) -> dict[str, int]:
        """Nothing: the weights lie in another process, in SGLang's own layout.

        Raises:
            KeyError: Names were given.
            RuntimeError: The weights sleep.
        """
        self._require_resident("hash_parameters")
        if names:
            raise KeyError(
                f"the {self._engine_name} engine cannot read back parameter {names[0]!r}; names "
                "must be those of parameter_manifest() that are verifiable"
            )
        return {}

    def _require_resident(self, method: str) -> None:
        if not self.is_resident:
            raise RuntimeError(
                f"the weights of the {self._engine_name} engine sleep; call wake_up(('weights',)) "
                f"before {method}()"
            )
