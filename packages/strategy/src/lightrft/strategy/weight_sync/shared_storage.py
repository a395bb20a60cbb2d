"""When an engine that shares the trainer's storage scores the canary again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightrft.strategy.weight_sync.accounting import PlannedParameter

# Syncs after which it is scored whatever else is known.
MAX_SYNCS_WITHOUT_CANARY = 9
# Address, strides and shape of a tensor.
Place = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class SharedStorage:
    """What the last sync found in storage that trainer and engine share.

    The canary finds tensors under wrong names, in a wrong order, or which training left behind.
    None of them can be new where every name has the tensor that it had when the canary was right,
    and every trained tensor has values other than at the last sync: the optimizer moved it, so it
    is the one that the optimizer moves.
    """

    _places: dict[str, Place] = field(default_factory=dict)
    _hashes: dict[str, int] = field(default_factory=dict)
    _num_without: int = 0

    def is_known(self, pairs: Sequence[PlannedParameter], hashes: Mapping[str, int]) -> bool:
        """Whether the canary would compare what it has compared."""
        if not self._places or self._num_without >= MAX_SYNCS_WITHOUT_CANARY:
            return False
        has_moved = all(
            hashes[pair.name] != self._hashes.get(pair.name)
            for pair in pairs
            if not pair.source.frozen
        )
        return has_moved and _places(pairs) == self._places

    def keep(
        self, pairs: Sequence[PlannedParameter], hashes: Mapping[str, int], *, was_scored: bool
    ) -> None:
        """Notes a sync that ended well."""
        self._places, self._hashes = _places(pairs), dict(hashes)
        self._num_without = 0 if was_scored else self._num_without + 1

    def forget(self) -> None:
        """Lets the next sync score the canary."""
        self._places.clear()


def _places(pairs: Sequence[PlannedParameter]) -> dict[str, Place]:
    shards = ((pair.name, pair.source.local_shard, pair.source.shape) for pair in pairs)
    return {name: (x.data_ptr(), x.stride(), tuple(shape)) for name, x, shape in shards}
