"""Messages about rows between the two sides of a split run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightrft.rollout.ledger_records import Evidence
from lightrft.rollout.open_groups import NOTHING_OPEN
from lightrft.rollout.source import Samples
from lightrft.stages.policy.step_metrics import Mean


@dataclass(frozen=True, slots=True)
class Start:
    """State of a run on the ranks that train, for the first step of a process.

    Args:
        parts: Rows in flight, see `rollout.in_flight.to_bytes`.
        num_requests: Prompts asked for so far.
        episode, num_consumed, sampler_state: Position in the prompts, see `SampledStream`.
        num_planned: Steps of the whole run; 0 is unknown.
        shared_prefix: The option, as the models allow it.
    """

    parts: Sequence[bytes]
    num_requests: int
    episode: int
    num_consumed: int
    sampler_state: str
    num_planned: int
    shared_prefix: str


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Samples of a step as all ranks know them; tokens go only to the ranks that train them.

    Args:
        samples: Samples without rows and evidence; their holders are ranks of the launch.
        special_ids: Special ids of the evidence; None without one.
        means: See `step_metrics.rollout_means`.
    """

    samples: Samples
    special_ids: frozenset[int] | None
    means: Sequence[Mean] = ()

    @property
    def for_training(self) -> Samples:
        """Samples for a rank that has sampled none of them."""
        if self.special_ids is None:
            return self.samples
        return replace(self.samples, evidence=Evidence({}, {}, self.special_ids))

    @staticmethod
    def held_by(samples: Samples, num_training: int) -> Samples:
        """Return the samples with the ranks of the launch as holders."""
        table = replace(samples.table, holders=samples.table.holders + num_training)
        return replace(samples, table=table, stream=NOTHING_OPEN)


@dataclass(frozen=True, slots=True)
class DrawnReport:
    """Report at the end of a step's sampling.

    Args:
        num_requests: Prompts asked for so far.
        num_prompts: Prompts of this step.
        num_tokens: Tokens sampled in this step over all ranks.
        seconds: Durations on this rank by stage.
        busy_seconds, thin_seconds: See `GenerationWork`.
        num_received_bytes: Bytes over the bridge since the last report, mostly weights.
        is_asked_to_stop: This rank received a signal to stop.
    """

    num_requests: int
    num_prompts: int
    num_tokens: int
    seconds: Mapping[str, float]
    busy_seconds: float
    thin_seconds: float
    num_received_bytes: int
    is_asked_to_stop: bool
