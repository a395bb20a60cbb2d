"""Rows that a step must draw, by seed, pass and step, and by the results of the steps before.

The formulas are those of docs/curricula.md, written a second time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from lightrft.config import TrainConfig
from lightrft.config.files import lines_of, parse_object
from lightrft.config.options import is_number
from lightrft.tools.audit.decisions import METRICS
from lightrft.tools.audit.record import (
    PLACES,
    RecordError,
    StepRecord,
    read_record,
)
from lightrft.tools.audit.samples import differ
from lightrft.tools.audit.sources import recorded_lines

# Defaults of the sampler pools.
POOLS = {"rest_weight": 0.1, "decay": 0.5, "readmit_steps": 50}
# Place in the data of a drawn row, and its mean share among all draws.
DrawnRow = tuple[int, float]


class UnknownOrderError(Exception):
    """The order cannot be recomputed; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Order:
    """Order of the rows of a run.

    Args:
        run: Folder of the run.
        record: Record of a step.
        config: Options of the step.
    """

    run: Path
    record: StepRecord
    config: TrainConfig

    def rows_of_step(self) -> list[DrawnRow]:
        """Return the rows that the step must draw.

        Raises:
            UnknownOrderError: Options, files or earlier records do not decide them.
        """
        facts, config = self.record.facts, self.config
        if config.allow_changes or facts.num_items < config.rollout_batch_size:
            raise UnknownOrderError("the run may have been continued with other data or options")
        if config.stream_chunk is not None:
            raise UnknownOrderError("streaming trains groups as they end, by the ledger's account")
        first, count = facts.step - 1, 1
        if config.dynamic_sampling:
            first, count = _batches_before(self.run, facts.step)
        return [row for i in range(count) for row in self._drawn(first + i)]

    def _drawn(self, number: int) -> list[DrawnRow]:
        """Return the rows of one draw, counted from 0."""
        config, num_rows = self.config, self.record.facts.num_items
        order, size = config.order, config.rollout_batch_size
        if order in ("shuffle", "in_order"):
            episode, place = divmod(number, num_rows // size)
            generator = torch.Generator().manual_seed(config.seed + episode)
            rows = torch.arange(num_rows)
            if order == "shuffle":
                rows = torch.randperm(num_rows, generator=generator)
            return [(int(row), 1 / num_rows) for row in rows[place * size :][:size]]
        if order == "weighted":
            weights = self._weights()
        elif order == "pools":
            weights = self._pool_weights(number)
        else:
            raise UnknownOrderError(f"prompt_sampler {order} is not recomputed")
        return _on_a_circle(weights / weights.sum(), size, [config.seed, number])

    def _weights(self) -> np.ndarray:
        """Return the weights of the rows from their files."""
        config = self.config
        if config.prompt_weight is None:
            values = self._spreads()
        else:  # rows of several files may be mixed
            lines = _read(self.run, None if config.prompt_data_probs else config.prompt_data)
            values = [line.get(config.prompt_weight) for line in lines]
        if len(values) != self.record.facts.num_items or not all(map(is_number, values)):
            raise UnknownOrderError("rows were left out or made of parts: weights have no places")
        return np.array(values, dtype=np.float64)

    def _spreads(self) -> list[object]:
        """Return the spreads of a file of rates, if its lines are the prompts of the run."""
        lines, samples = _read(self.run, self.config.prompt_rates), self.record.samples
        ends = np.cumsum(samples.prompt_lengths + samples.response_lengths)
        ids = np.split(samples.token_ids.astype("<u4"), ends[:-1])
        hashes = [str(line.get("prompt")) for line in lines]
        if len({*hashes}) != self.record.facts.num_items or any(
            hashes[place] != hashlib.sha256(row[:size].tobytes()).hexdigest()
            for place, row, size in zip(
                samples.facts[PLACES], ids, samples.prompt_lengths, strict=True
            )
        ):
            raise UnknownOrderError("the file of rates is not one line for each prompt, in order")
        right, count = (
            np.array([line.get(name) for line in lines], dtype=np.float64)
            for name in ("num_right", "num_samples")
        )
        share = (right + 1) / (count + 2)
        return [*(share * (1 - share))]

    def _pool_weights(self, number: int) -> np.ndarray:
        """Return the weights of pools after the results that were known at a draw."""
        config, size = self.config, self.record.facts.num_items
        if config.prompt_rates is not None or config.dynamic_sampling:
            raise UnknownOrderError("pools by measured rates or dynamic sampling are not replayed")
        settings = {**POOLS, **(config.prompt_sampler_args or {})}
        rest, decay, memory = (float(settings[name]) for name in POOLS)
        num_known = max(0, number - config.rollout_lag)
        rates, counts, last = np.ones(size), np.zeros(size), np.full(size, -math.inf)
        for step in range(1, num_known + 2):
            counts[step - last > memory] = 0
            for place, accuracies in _results(self.run, step) if step <= num_known else ():
                counts[place] += 1
                old = min(1 - 1 / counts[place], decay)
                rates[place] = old * rates[place] + (1 - old) * differ(accuracies)
                last[place] = step
        return np.where(counts > 0, np.maximum(rates, rest), 1.0)


def _batches_before(run: Path, step: int) -> tuple[int, int]:
    """Return the batches of prompts drawn before a step of dynamic sampling, and in it."""
    path = run / METRICS
    entries = map(parse_object, lines_of(path) if path.is_file() else ())
    pairs = [(each.get("step"), each.get("dynamic/num_gen_batches")) for each in entries]
    counts = {int(i): int(count) for i, count in pairs if is_number(i) and is_number(count)}
    if not {*range(1, step + 1)} <= counts.keys():
        raise UnknownOrderError(f"{METRICS} does not say how many batches each step drew")
    return sum(counts[number] for number in range(1, step)), counts[step]


def _on_a_circle(shares: np.ndarray, size: int, seed: list[int]) -> list[DrawnRow]:
    """Draw by equal steps around a circle on which each row is as long as its share."""
    numbers = np.random.default_rng(seed)
    order, turn = numbers.permutation(len(shares)), numbers.random()
    ends, place, rows = [*accumulate(shares[order].tolist())], 0, []
    for i in range(size):
        while ends[place] <= (i + turn) / size * ends[-1] and ends[place] < ends[-1]:
            place += 1
        rows.append((int(order[place]), float(shares[order[place]])))
    return rows


def _read(run: Path, names: str | None) -> list[dict[str, object]]:
    """Return the lines of files that the run read.

    Raises:
        UnknownOrderError: They are no files of lines, or others by now.
    """
    lines = recorded_lines(run, names)
    if lines is None:
        raise UnknownOrderError("the weights are in no file of lines that is still as it was")
    return [*map(parse_object, lines)]


def _results(run: Path, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield place and accuracies of each group of an earlier step; none where nothing counts."""
    try:
        samples = read_record(run, step).samples
    except RecordError as error:
        raise UnknownOrderError(f"pools need audit_every 1: {error}") from error
    for group in np.unique(samples.group_ids):
        rows = samples.group_ids == group
        kept = samples.accuracies[rows & ~samples.is_failed]
        if len(kept):
            yield int(samples.facts[PLACES][rows][0]), torch.from_numpy(kept)
