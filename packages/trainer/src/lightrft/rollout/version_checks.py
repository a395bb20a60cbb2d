"""Check that rows kept for later steps were sampled with the weights that they name.

When such rows are trained on, the trainer's weights are newer, so its logprobs cannot verify them.
Instead, the engine scores a row right after sampling it, without its caches. The version of every
row is compared with the version that the trainer recorded for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightrft.engines.base import RolloutEngine
from lightrft.records.rollout import ScoredRollout
from lightrft.records.table import RowTable, tabulate
from lightrft.rollout.ledger_records import LedgerError
from lightrft.rollout.single_turn import turn_source
from lightrft.rollout.source import Samples, SourceParts
from lightrft.strategy.distributed.collectives import gather_objects, group_rank, run_together
from lightrft.strategy.weight_sync.canary import CANARY_LIMITS, QUANTISED_LIMITS

# Limit for scored rows, because any engine holds all logits of a row in memory.
MAX_TOKENS = 256


@dataclass(slots=True)
class SampledVersions:
    """Versions of the weights with which steps were sampled, by step.

    Args:
        is_stream: Whether responses continue over weight updates, so that some tokens are older.
    """

    is_stream: bool
    _known: dict[int, int | None] = field(default_factory=dict)

    def note(self, steps: range, version: int, *, num_held: int) -> None:
        """Record the engine's version for the steps that it samples.

        Args:
            steps: Steps from the one that is trained next to the last one that is sampled now.
            version: Version of the engine's weights.
            num_held: Number of first steps from a checkpoint, whose versions are unknown.
        """
        for step in steps:
            self._known.setdefault(step, None if step < steps.start + num_held else version)

    def check(self, step: int, table: RowTable) -> None:
        """Check the rows of all ranks that a step trains on, so that all ranks agree.

        Raises:
            LedgerError: A row names other weights than those that sampled its step.
        """
        expected = self._known.get(step)
        self._known = {number: of for number, of in self._known.items() if number >= step}
        if expected is None:
            return
        actual = table.weights_versions
        is_wrong = actual > expected if self.is_stream else actual != expected
        wrong = np.flatnonzero(is_wrong & (table.sampled_lengths > 0))
        if len(wrong):
            raise LedgerError(
                f"ledger gate: sample {table.sample_ids[wrong[0]]} of step {step} is said to be "
                f"of version {actual[wrong[0]]} of the weights: the engine had version {expected}; "
                "nothing was trained. Report this: it is a bug in lightrft; "
                "--no_ledger_gate trains all the same"
            )


def check_fresh_row(samples: Samples, parts: SourceParts) -> None:
    """Check that each engine scores a row as it sampled it; collective.

    The check is skipped if the sampling distribution is not that of temperature 1. Rows with media
    are ignored, because engines do not score them.

    Args:
        samples: Samples of the current step.
        parts: Parts of the run, with the engine awake.

    Raises:
        LedgerError: Sampling and scoring differ: the engine used cached keys and values of other
            weights, or its weights changed meanwhile.
    """
    config, engine = parts.config, parts.session.engine
    is_cut = config.top_p < 1 or config.top_k != -1 or config.min_p > 0
    if engine is None or not engine.computes_model or is_cut or config.temperature != 1.0:
        return
    parts.session.wake_up()  # it sleeps if all episodes of the step came from the journal
    local_row = _short_row(samples, engine.weights_version)
    chosen = local_row
    if parts.session.shares_engine:
        group = parts.context.engine_group
        chosen = gather_objects(local_row, group)[0]
        if not engine.runs_on_every_rank and group_rank(group) > 0:
            chosen = None
    num_hot = int(turn_source(config.use_fire).first_temperature(config) is not None)
    run_together(
        lambda: None if chosen is None else _compare(chosen, engine, num_hot=num_hot),
        parts.context.world_group,
        what="scoring a row that was just sampled failed",
    )


def _short_row(samples: Samples, version: int) -> ScoredRollout | None:
    """Return the row with most tokens from these weights, if possible a short one."""
    known = [
        item
        for item in samples.scored
        if item.rollout.completion.weights_version == version and not item.rollout.media
    ]
    # If all rows are long, only the beginning of one is scored.
    rows = [item for item in known if len(item.rollout.token_ids) <= MAX_TOKENS] or known
    return max(rows, key=lambda i: len(i.rollout.completion.sampled_token_ids), default=None)


def _compare(item: ScoredRollout, engine: RolloutEngine, *, num_hot: int) -> None:
    table = tabulate([item])
    ids = table.token_ids[:MAX_TOKENS].tolist()
    scored = np.array(engine.score(ids), np.float64)[int(table.prompt_lengths[0]) :]
    count = len(scored)
    sampled = table.rollout_logprobs[:count].astype(np.float64)
    is_new = table.is_sampled[:count] & (table.token_versions[:count] == engine.weights_version)
    is_new[:num_hot] = False
    if not is_new.any():
        return
    difference = np.abs(scored - sampled)[is_new]
    dtypes = {parameter.dtype for parameter in engine.parameter_manifest()}
    limits = [CANARY_LIMITS.get(dtype, QUANTISED_LIMITS) for dtype in dtypes]
    allowed = max(limits, key=lambda each: each.mean)
    # The condition is negated so that NaN fails.
    if not (difference.mean() <= allowed.mean and difference.max() <= allowed.largest):
        raise LedgerError(
            f"ledger gate: the engine scores sample {table.sample_ids[0]} otherwise than it "
            f"sampled it: logprobs differ by {difference.mean():.2e} in the mean and "
            f"{difference.max():.2e} at most (limits {allowed.mean:g} and {allowed.largest:g}): "
            "it sampled from cached keys and values of other weights, or its weights were changed "
            "meanwhile; nothing was trained"
        )
