"""What engines have in common whose weights are plain tensors of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightrft.engines.base import RolloutEngine
from lightrft.engines.parameter_store import ParameterStore
from lightrft.engines.types import EngineParameter, EngineStatus, WeightPiece

if TYPE_CHECKING:
    import torch

_TAGS = ("weights", "kv_cache")


class LocalEngine(RolloutEngine):
    """An engine over a `ParameterStore`; sampling is left to subclasses.

    Args:
        weights: The engine's parameters.
    """

    runs_on_every_rank = False

    def __init__(self, weights: ParameterStore) -> None:
        super().__init__()
        self._weights = weights
        self._sleeping_tags: set[str] = set()

    def sleep(self, level: int = 1) -> None:
        """Releases memory; weights that alias the trainer's are left where they are.

        Raises:
            ValueError: The level is neither 1 nor 2.
            RuntimeError: A weight update is open.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2: got {level}")
        if self._weights.transaction.is_open:
            raise RuntimeError(f"the {self.name} engine cannot sleep while a weight update is open")
        self._weights.release(level)
        self._sleeping_tags = set(_TAGS)
        self.status = EngineStatus.SLEEPED

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Takes memory back; the engine is awake once both tags are.

        Raises:
            ValueError: A tag is unknown.
        """
        tags = _TAGS if tags is None else tags
        unknown = sorted(set(tags) - set(_TAGS))
        if unknown:
            raise ValueError(f"unknown wake-up tags {unknown}; known: {', '.join(_TAGS)}")
        if "weights" in tags:
            self._weights.restore()
        self._sleeping_tags -= set(tags)
        if not self._sleeping_tags:
            self.status = EngineStatus.WAKEUP

    @property
    def weights_were_dropped(self) -> bool:
        """Whether some parameter holds no weights, or none was ever sent."""
        return self.weights_version < 0 or bool(self._weights.transaction.unwritten)

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """Every parameter of the model, in its own order."""
        return self._weights.manifest

    def begin_weight_update(self) -> None:
        """Opens an update."""
        self._weights.begin()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Copies pieces into the parameters."""
        self._weights.load(pieces)

    def finish_weight_update(self) -> None:
        """Closes the update; raises if a parameter was written in part."""
        self._weights.transaction.finish()

    def reset_caches(self) -> None:
        """Drops cached activations, which ends an update."""
        self._weights.transaction.reset_caches()

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Hashes of the parameters themselves; without names, of all that own their storage."""
        return self._weights.hashes(names)

    def alias_weights(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Uses the given tensors as parameters if names, shapes, dtypes and devices agree."""
        return self._weights.alias(tensors)

    def check_usable(self) -> None:
        """Raises unless the engine is awake and holds a complete set of weights."""
        self._weights.transaction.check_settled()
        super().check_usable()

    def close(self) -> None:
        """Frees the weights; `generate` raises from now on."""
        self._weights.release(2)
        self._sleeping_tags = set(_TAGS)
        self.status = EngineStatus.SLEEPED
