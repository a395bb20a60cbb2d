"""The engines of the ranks that generate, as the ranks that train see them.

`WeightSync` keeps them equal to the trainer's weights and verifies it, as for a local engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Never, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightrft.engines.base import FinishedRows, RolloutEngine
from lightrft.engines.ledger import Ledger
from lightrft.engines.rows import RequestedSample
from lightrft.engines.types import (
    Completion,
    EngineParameter,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
)
from lightrft.kernels import BucketLayout, WeightPiece
from lightrft.kernels.weight_bucket.broadcaster import ShardSource
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.split.bridge import Bridge
from lightrft.strategy.split.weight_wire import WeightWire
from lightrft.strategy.weight_sync.parameter_source import AddLocal
from lightrft.strategy.weight_sync.verification import note_hashes

# Phase of a rank that generates.
RECEIVE: Final = "receive the weights"


class RemoteEngine(RolloutEngine):
    """Proxy of all engines of the ranks that generate.

    Every rank that trains makes each call. Commands come from the first one, shards of weights from
    their owners.

    Args:
        bridge: Connection to them.
        name: Name of their kind, in the registry.
        wire: Transport of the weights; None makes one.
    """

    def __init__(self, bridge: Bridge, name: str, wire: WeightWire | None = None) -> None:
        self.bridge, self.name = bridge, name
        self._wire = wire or WeightWire(bridge)
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
        """Return their parameters; the first call waits for the engines to start.

        Raises:
            RuntimeError: They differ.
        """
        if self._manifest is None:
            manifests = cast("list[tuple[object, bool, bool]]", self.bridge.ask("manifest"))
            if any(each != manifests[0] for each in manifests):
                raise RuntimeError("the engines of the ranks that generate differ in parameters")
            manifest, self.computes_model, self.keeps_base = manifests[0]
            self._manifest = cast("tuple[EngineParameter, ...]", manifest)
        return self._manifest

    def begin_weight_update(self) -> None:
        """Begin an update on all engines."""
        self.bridge.send("begin")

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Refuse pieces: the owners send the shards."""
        raise NotImplementedError

    def load_shards(
        self,
        layout: BucketLayout,
        group: ProcessGroup | None,
        sources: ShardSource,
        *,
        add_local: AddLocal | None,
        unreadable: frozenset[str],
    ) -> dict[str, int]:
        """Send this rank's shards of all buckets to all engines.

        Args:
            layout: Layout of the buckets.
            group: Ranks that hold the shards; None if each holds all.
            sources, add_local: See `BucketBroadcaster.gather`.
            unreadable: Names of parameters that the engines cannot show later.

        Returns:
            Hashes of these as they were passed to the engines.
        """
        owners = [0] if group is None else dist.get_process_group_ranks(group)
        if 0 not in owners:  # another replica's ranks send
            owners = []
        known = layout if self._wire.is_new(layout) else None
        self.bridge.send("load", known, owners, unreadable)
        try:
            self._wire.send(layout, owners, sources, add_local=add_local)
        finally:  # the engines answer in any case
            answers = self.bridge.results()
        return _merged(answers)

    def finish_weight_update(self) -> None:
        """Finish an update on all engines."""
        self.bridge.send("finish")

    def reset_caches(self) -> None:
        """Reset the caches of all engines."""
        self.bridge.send("reset")

    def set_weights_version(self, version: int) -> None:
        """Set the version of all engines."""
        super().set_weights_version(version)
        self.bridge.send("version", version)

    def hash_parameters(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Return hashes of the first engine; of a differing parameter, those of the other engine.

        So a comparison detects a difference in any engine.
        """
        return _merged(self.bridge.ask("hashes", names))

    def alias_weights(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return False: they are in other processes."""
        del tensors
        return False

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling_params: SamplingParams,
        *,
        on_finished: Callable[[list[Completion]], None] | None = None,
    ) -> list[Completion]:
        """Generate on each engine, and check that they agree.

        Raises:
            RuntimeError: They do not.
        """
        del on_finished
        answers = self.bridge.ask("call", "generate", list(requests), sampling_params)
        return cast("list[Completion]", _equal(answers, "generate"))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Score on each engine, and check that they agree."""
        return cast("list[float]", _equal(self.bridge.ask("call", "score", token_ids), "score"))

    def stream_rows(self, rows: Sequence[RequestedSample], params: SamplingParams) -> FinishedRows:
        """Refuse rows: the engines behind the bridge stream for themselves."""
        raise NotImplementedError

    def sleep(self, level: int = 1) -> None:
        """Do nothing: they have their devices for themselves."""

    def wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Do nothing: they never sleep."""

    def close(self) -> None:
        """Do nothing: they end with their ranks."""


def _merged(answers: Sequence[object]) -> dict[str, int]:
    """Return hashes of the first engine; of a differing parameter, those of the other engine."""
    first, *others = cast("Sequence[dict[str, int]]", answers)
    merged = dict(first)
    for each in others:
        merged |= {name: value for name, value in each.items() if first.get(name) != value}
    return merged


def _equal(found: Sequence[object], what: str) -> object:
    if any(each != found[0] for each in found):
        raise RuntimeError(
            f"the engines of the ranks that generate {what} the canary prompt differently"
        )
    return found[0]


def engine_handlers(
    engine: RolloutEngine, bridge: Bridge, wire: WeightWire | None = None
) -> dict[str, Callable[..., None]]:
    """Return the function of each command for the engine of a rank that generates.

    Args:
        engine, bridge: Engine, and connection to the ranks that train.
        wire: Transport of the weights; None makes one.
    """
    wire, layouts = wire or WeightWire(bridge), list[BucketLayout]()

    def load(
        layout: BucketLayout | None, owners: Sequence[int], unreadable: frozenset[str]
    ) -> None:
        if layout is not None:
            layouts[:] = [layout]
        handed, problem = dict[str, int](), None
        with phase(RECEIVE, bridge.timeout):
            for pieces in wire.receive(layouts[0], owners):
                try:
                    note_hashes(handed, [p for p in pieces if p.name in unreadable])
                    engine.load_weights(pieces)
                except Exception as error:  # noqa: BLE001 - raised once all buckets are here
                    problem = problem or error
            if problem is not None:
                raise problem
            bridge.answer(handed)

    def call(name: str, *arguments: object) -> None:
        asked: dict[str, Callable[..., object]]
        asked = {"generate": engine.generate, "score": engine.score}
        bridge.answer(asked[name](*arguments))

    return {
        "manifest": lambda: bridge.answer(
            (engine.parameter_manifest(), engine.computes_model, engine.keeps_base)
        ),
        "begin": engine.begin_weight_update,
        "load": load,
        "finish": engine.finish_weight_update,
        "reset": engine.reset_caches,
        "version": engine.set_weights_version,
        "hashes": lambda names: bridge.answer(engine.hash_parameters(names)),
        "call": call,
    }
