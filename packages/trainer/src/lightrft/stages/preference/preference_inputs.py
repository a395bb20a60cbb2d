"""Inputs of learning from preferences: options and rows, checked first, then built with models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.preference_rows import Preference, PreferenceRows, load_preferences
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.models import Actor
from lightrft.stages.models import place_frozen, require_equal_start
from lightrft.stages.opening import shared_prompts
from lightrft.stages.preference.preference_objective import build_objective
from lightrft.stages.preference.preference_stage import PreferenceStage
from lightrft.stages.preference.stored_reference import (
    StoredReference,
    hash_of_start,
    origin_of_data,
    read_stored,
    require_origin,
    stored_path,
)
from lightrft.stages.rows.row_inputs import (
    RowReading,
    build_model,
    check_auditable,
    decided_for_rows,
    last_trained,
    option_problems,
    read_rows,
    shown_mask,
)
from lightrft.stages.rows.row_stage import planned_updates
from lightrft.stages.stage import TrainedModels
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from lightrft.strategy.backend import PreparedModel


@dataclass(frozen=True, slots=True)
class PreferenceInputs:
    """Preferences of a run; see `StageInputs`."""

    reading: RowReading
    data: PreferenceRows
    held_out: tuple[Preference, ...] = ()
    stored: StoredReference | None = None

    def decided(self, config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
        """See `StageInputs`."""
        return decided_for_rows(config, strategy)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> PreferenceStage:
        """See `StageInputs`."""
        num_steps = planned_updates(self.data, config, strategy)
        strategy.print(self.data.summary)
        first = self.data.rows[0]
        self.reading.statements.say(strategy.print, last=last_trained(first.rows[0]))
        for row, is_good in zip(first.rows, first.labels, strict=True):
            name = "chosen" if is_good else "rejected"
            strategy.print(f"{name} in {shown_mask(row, self.reading.tokenizer)}")
        kind = "pairs" if self.data.is_paired else "answers"
        strategy.print(f"{num_steps} steps of {config.train_batch_size} {kind}")
        for line in shared_prompts(
            (item.rows[0].prompt_key for item in self.data.rows),
            [item.rows[0].prompt_key for item in self.held_out],
            kind,
        ):
            strategy.print(line)
        with phase("load the model", timedelta(minutes=config.timeout_minutes)):
            needs_reference = self.stored is None
            models, reference = build_models(
                config, strategy, num_steps, loads_reference=needs_reference
            )
        stage = PreferenceStage(config, strategy, models, reference, self.data, self.held_out)
        stage.text_part = self.reading.text_part
        with phase("score the first rows", timedelta(minutes=config.timeout_minutes)):
            if (path := stored_path(config)) is not None:
                self._store(path, stage)
            stage.prove_equal_start()
        return stage

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """See `StageInputs`."""
        return [item.rows for item in self.data.rows]

    def media_digests(self) -> Iterator[bytes]:
        """See `StageInputs`."""
        return (each for item in self.items() for row in item for each in row.media_digests)

    def _store(self, path: Path, stage: PreferenceStage) -> None:
        """Reads the reference's numbers, or computes and writes them; collective.

        Raises:
            ConfigError: Those of the file are of another model.
        """
        strategy, held_out = stage.strategy, self.held_out
        origin = origin_of_data(self.data.rows, held_out, self.reading.tokenizer)
        origin = replace(
            origin, model=hash_of_start(cast("PreparedModel", stage.models.main.model), strategy)
        )
        stored = self.stored
        if stored is None:
            stored = StoredReference(
                origin, stage.reference_sums(self.data.rows), stage.reference_sums(held_out)
            )
            if strategy.is_rank_0():
                stored.save(path)
        require_origin(stored, origin, path)
        said = "written to" if self.stored is None else "read from"
        strategy.print(f"the reference's log-probabilities were {said} {path}")
        stage.use_stored(stored)

    def close(self) -> None:
        """See `StageInputs`."""


def read_inputs(config: TrainConfig) -> PreferenceInputs:
    """Checks the options, then reads tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    problems = preference_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError("\n".join(problems))
    reading, data, found = read_rows(config, load_preferences)
    held_out = () if found is None else found.rows
    problems = data_problems(config, data, held_out)
    if problems:
        raise ConfigError("\n".join(problems))
    check_auditable(config, (row for each in data.rows for row in each.rows))
    stored, path = None, stored_path(config)
    if path is not None:
        if any(row.shown for each in (*data.rows, *held_out) for row in each.rows):
            raise ConfigError("ref_logprobs: rows with images have no stored ones: leave it out")
        if path.exists():
            sizes = len(data), len(held_out)
            origin = origin_of_data(data.rows, held_out, reading.tokenizer)
            stored = read_stored(path, origin, sizes)
    return PreferenceInputs(reading, data, held_out, stored)


def preference_problems(config: TrainConfig, num_processes: int) -> list[str]:
    """Problems of the options of learning from preferences, one line each."""
    found = option_problems(config, num_processes, "prefer")
    try:
        build_objective(config)
    except ConfigError as error:
        found += str(error).splitlines()
    return found


def data_problems(
    config: TrainConfig, data: PreferenceRows, held_out: tuple[Preference, ...]
) -> list[str]:
    """Reasons why these losses cannot be computed from this data, one line each."""
    found = []
    size = config.train_batch_size
    objective = build_objective(config)
    of_pairs = [term.name for term in objective.terms if not term.traits.is_of_answers]
    if of_pairs and not data.is_paired:
        found.append(
            f"preference_loss {' '.join(of_pairs)} compares two answers to a prompt, and the rows "
            "of prompt_data are labelled one by one: give pairs, or kto or apo_zero_unpaired"
        )
    if held_out and len(held_out[0].rows) != len(data.rows[0].rows):
        found.append("prompt_data and eval_data must both hold pairs, or both labelled answers")
    if objective.uses_kl and size < 2:
        found.append(
            f"preference_loss kto compares with the other prompts of a step: it needs "
            f"train_batch_size >= 2, got {size}"
        )
    if config.ref_logprobs is not None and (objective.uses_kl or not objective.uses_reference):
        why = "scores answers to other prompts" if objective.uses_kl else "has no reference"
        found.append(
            f"ref_logprobs: preference_loss {config.preference_loss[0]} {why}: leave it out"
        )
    return found


def build_models(
    config: TrainConfig, strategy: StrategyBase, max_steps: int, *, loads_reference: bool = True
) -> tuple[TrainedModels, nn.Module | None]:
    """Loads and prepares the model that is trained, and its frozen copy where one is needed.

    Without its adapters an adapted model is its own reference.

    Args:
        config: Its path and options.
        strategy: Prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
        loads_reference: Not where its numbers are read from a file.
    """
    models, reference = build_model(config, strategy, max_steps), None
    if loads_reference and build_objective(config).uses_reference and config.lora_rank == 0:
        path, new = str(config.pretrain), config.allow_new_weights
        read = partial(Actor.from_pretrained, path, allow_new_weights=new)
        reference = place_frozen(read, config, strategy)
        require_equal_start(strategy, models.main.model, reference)
    return models, reference
