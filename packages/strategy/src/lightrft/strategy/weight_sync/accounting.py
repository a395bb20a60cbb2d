"""Decides, before anything is sent, what happens to every parameter of a rollout engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightrft.engines.types import EngineParameter
from lightrft.strategy.weight_sync.parameter_source import SourceParameter

Check = Literal["accounting", "hash", "canary", "caches", "transfer", "peer"]
MAX_LISTED_NAMES = 8


class WeightSyncError(RuntimeError):
    """The engine does not, or would not, hold the trainer's weights.

    Attributes:
        check: What found it: "accounting" (names and shapes, before anything was sent), "transfer"
            (the engine refused a tensor), "hash" (final storage), "canary" (logprobs of a fixed
            prompt), "caches" (activations of earlier weights) or "peer" (another rank).
        names: Checkpoint names of the parameters concerned; empty where no one is to blame.
    """

    def __init__(self, check: Check, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(f"weight sync failed ({check}): {message}")
        self.check: Check = check
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """An engine parameter together with the trainer's parameter that fills it."""

    target: EngineParameter
    source: SourceParameter

    @property
    def name(self) -> str:
        """The engine's name of the parameter."""
        return self.target.name

    @property
    def num_bytes(self) -> int:
        """Bytes in the engine's dtype."""
        return self.target.numel * self.target.dtype.itemsize


def match_parameters(
    manifest: Sequence[EngineParameter],
    parameters: Sequence[SourceParameter],
    tied_names: Mapping[str, str],
) -> tuple[PlannedParameter, ...]:
    """Pairs every engine parameter that has storage of its own with its source.

    A parameter that the engine ties to another has no storage and is left out; one that only the
    trainer ties is filled from the parameter it shares there.

    Args:
        manifest: All parameters of the engine.
        parameters: All parameters of the trainer, tied ones once.
        tied_names: The trainer's second names of tied parameters -> the name in `parameters`.

    Returns:
        In the order of the manifest.

    Raises:
        WeightSyncError: Names are missing on either side, shapes differ, or the engine ties what
            the trainer holds separately; the message lists all of them.
    """
    sources = {parameter.checkpoint_name: parameter for parameter in parameters}
    owners = {name: name for name in sources} | dict(tied_names)
    pairs: list[PlannedParameter] = []
    problems: dict[str, str] = {}
    for target in manifest:
        owner = owners.get(target.name)
        if target.tied_to is not None:
            if owner is not None and owner != owners.get(target.tied_to):
                problems[target.name] = f"tied to {target.tied_to!r} in the engine only"
        elif owner is None:
            problems[target.name] = "needed by the engine, unknown to the trainer"
        elif sources[owner].shape != target.shape:
            problems[target.name] = (
                f"shape {sources[owner].shape} in the trainer, {target.shape} in the engine"
            )
        else:
            pairs.append(PlannedParameter(target, sources[owner]))
    known = {target.name for target in manifest}
    used = {owners[name] for name in known if name in owners}
    for name in sources:
        if name not in used:
            problems[name] = "held by the trainer, unknown to the engine"
    if problems:
        described = (f"{name} ({problem})" for name, problem in problems.items())
        raise WeightSyncError("accounting", listed(described), problems)
    return tuple(pairs)


def parameters_to_send(
    pairs: Sequence[PlannedParameter], resident_names: frozenset[str]
) -> tuple[PlannedParameter, ...]:
    """Pairs that must be written now; the others are frozen and resident.

    Args:
        pairs: All parameters of the engine.
        resident_names: Frozen parameters that the engine verifiably holds already. One that shares
            an engine tensor with a parameter that is sent is sent with it.
    """
    names = {pair.name for pair in pairs if pair.name not in resident_names}
    for pair in pairs:
        if pair.name in names:
            names.update(pair.target.fused_with)
    return tuple(pair for pair in pairs if pair.name in names)


def listed(items: Iterable[str]) -> str:
    """The first items, and how many more there are."""
    found = list(items)
    hidden = len(found) - MAX_LISTED_NAMES
    return ", ".join(found[:MAX_LISTED_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
