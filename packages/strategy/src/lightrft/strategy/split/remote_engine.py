"""The engines of the ranks that generate, as the ranks that train see them.

`WeightSync` keeps them equal to the trainer's weights, and proves it, as if it had them at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Never, cast

import torch
from torch import Tensor

from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.ledger import Ledger
from lightrft.engines.rows import Row
from lightrft.engines.types import (
    Completion,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
)
from lightrft.kernels import WeightPiece
from lightrft.strategy.split.bridge import Bridge

# Name, full shape, first element and dtype of a piece.
Header = tuple[str, tuple[int, ...], int, torch.dtype]


class RemoteEngine(RolloutEngine):
    """Stands for all engines of the ranks that generate.

    What they are asked, every rank that trains asks; what they are sent, the first one sends.

    Args:
        bridge: To them.
        name: Of their kind, in the registry.
    """

    def __init__(self, bridge: Bridge, name: str) -> None:
        self.bridge, self.name = bridge, name
        self.status = EngineStatus.WAKEUP
        self.weights_version = -1
        self.ledger = Ledger()
        self.seen_media = None
        self._running = None
        self._stale_reason = None
        self._manifest: tuple[EngineParameter, ...] | None = None

    @property
    def native(self) -> Never:
        """There is none here."""
        raise RuntimeError("the engine is that of the ranks that generate")

    @property
    def weights_were_dropped(self) -> bool:
        """Never: they do not sleep."""
        return self.weights_version < 0

    def parameter_manifest(self) -> tuple[EngineParameter, ...]:
        """See `RolloutEngine`; the first call waits for the engines to start.

        Raises:
            RuntimeError: They differ.
        """
        if self._manifest is None:
            found = cast("list[tuple[object, bool]]", self.bridge.ask("manifest"))
            if any(each != found[0] for each in found):
                raise RuntimeError("the engines of the ranks that generate differ in parameters")
            manifest, self.computes_model = found[0]
            self._manifest = cast("tuple[EngineParameter, ...]", manifest)
        return self._manifest

    def begin_weight_update(self) -> None:
        """See `RolloutEngine`."""
        self.bridge.send("begin")

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Sends pieces to all engines; see `RolloutEngine`."""
        found = list(pieces)
        if self.bridge.side.rank:
            return
        headers = [(p.name, p.shape, p.start, p.tensor.dtype) for p in found]
        counts = [p.tensor.numel() for p in found]
        raw = [p.tensor.detach().contiguous().view(torch.uint8).reshape(-1).cpu() for p in found]
        self.bridge.send("load", headers, counts, values=torch.cat(raw))

    def finish_weight_update(self) -> None:
        """See `RolloutEngine`."""
        self.bridge.send("finish")

    def reset_caches(self) -> None:
        """See `RolloutEngine`."""
        self.bridge.send("reset")

    def set_weights_version(self, version: int) -> None:
        """See `RolloutEngine`."""
        super().set_weights_version(version)
        self.bridge.send("version", version)

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Hashes of the first engine; of a parameter that another one holds otherwise, that one's.

        Whatever they are compared with, a difference in any engine is found.
        """
        first, *others = cast("list[dict[str, int]]", self.bridge.ask("hashes", names))
        found = dict(first)
        for each in others:
            found |= {name: value for name, value in each.items() if first.get(name) != value}
        return found

    def alias_weights(self, tensors: Mapping[str, Tensor]) -> bool:
        """Never: they are in other processes."""
        del tensors
        return False

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling_params: SamplingParams,
        *,
        on_finished: Callable[[list[Completion]], None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine`; each engine samples, and they must agree.

        Raises:
            RuntimeError: They do not.
        """
        del on_finished
        found = self.bridge.ask("call", "generate", list(requests), sampling_params)
        return cast("list[Completion]", _equal(found, "generate"))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `generate`."""
        return cast("list[float]", _equal(self.bridge.ask("call", "score", token_ids), "score"))

    def _stream(self, rows: Sequence[Row], params: SamplingParams) -> FinishedRows:
        """Never called: the engines behind the bridge stream for themselves."""
        raise NotImplementedError

    def sleep(self, level: int = 1) -> None:
        """Nothing: they have their devices for themselves."""

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: they end with their ranks."""


def _equal(found: Sequence[object], what: str) -> object:
    if any(each != found[0] for each in found):
        raise RuntimeError(
            f"the engines of the ranks that generate {what} the canary prompt differently"
        )
    return found[0]


def engine_handlers(engine: RolloutEngine, bridge: Bridge) -> dict[str, Callable[..., None]]:
    """What a rank that generates does with its engine when the other side says so."""

    def load(headers: Sequence[Header], counts: Sequence[int], values: Tensor) -> None:
        pieces, start = [], 0
        for (name, shape, first, dtype), count in zip(headers, counts, strict=True):
            stop = start + count * dtype.itemsize
            # A copy, since the bytes of one dtype may begin where another one must not.
            tensor = values[start:stop].clone().view(dtype)
            pieces.append(WeightPiece(name, shape, first, tensor))
            start = stop
        engine.load_weights(pieces)

    def call(name: str, *arguments: object) -> None:
        asked: dict[str, Callable[..., object]]
        asked = {"generate": engine.generate, "score": engine.score}
        bridge.answer(asked[name](*arguments))

    return {
        "manifest": lambda: bridge.answer((engine.parameter_manifest(), engine.computes_model)),
        "begin": engine.begin_weight_update,
        "load": load,
        "finish": engine.finish_weight_update,
        "reset": engine.reset_caches,
        "version": engine.set_weights_version,
        "hashes": lambda names: bridge.answer(engine.hash_parameters(names)),
        "call": call,
    }
