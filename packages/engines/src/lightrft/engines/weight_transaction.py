"""Accounting of one weight update: which elements arrived, and when an engine may be used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from lightrft.engines.base import StaleEngineError
from lightrft.engines.types import EngineParameter, WeightPiece


class WeightTransaction:
    """Follows begin / load... / finish / reset and refuses what would leave mixed weights.

    Args:
        engine_name: Names the engine in errors.
        manifest: Every parameter of the engine.
        unwritten: Names that hold no weights yet.
    """

    def __init__(
        self,
        engine_name: str,
        manifest: Sequence[EngineParameter],
        *,
        unwritten: Iterable[str] = (),
    ) -> None:
        self._engine_name = engine_name
        self._parameters: Mapping[str, EngineParameter] = {p.name: p for p in manifest}
        self._phase: Literal["settled", "open", "caches"] = "settled"
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self.unwritten: set[str] = set(unwritten)

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and is not finished."""
        return self._phase == "open"

    def begin(self) -> None:
        """Opens an update.

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
        """Checks one piece against the manifest and counts its range as written.

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
        """Closes the update; caches must still be reset.

        Raises:
            RuntimeError: No update is open.
            ValueError: A parameter was written in part, or without the others of its fused engine
                tensor; it names each and stays unusable until it is written in full.
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

    def reset_caches(self) -> None:
        """Declares the caches empty, which ends the update."""
        if self._phase == "caches":
            self._phase = "settled"

    def check_settled(self) -> None:
        """Raises unless the last update is over and every parameter holds weights.

        Raises:
            StaleEngineError: The message says what is missing.
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
    """Number of elements in the union of half-open ranges."""
    num_covered = 0
    end = 0
    for start, stop in sorted(ranges):
        num_covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return num_covered
