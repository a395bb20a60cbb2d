"""Inputs of learning from preferences: options and rows, checked first, then built with models."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightrft.config import ConfigError, RowRunOptions, TrainConfig
from lightrft.datasets.preference_rows import Preference, load_preferences
from lightrft.models import Actor
from lightrft.stages.models import place_frozen, require_equal_start
from lightrft.stages.preference.preference_loss import build_loss
from lightrft.stages.preference.preference_objective import KnownPreferences, PreferenceObjective
from lightrft.stages.preference.stored_reference import (
    StoredReference,
    hash_of_start,
    origin_of_data,
    read_stored,
    require_origin,
    stored_path,
)
from lightrft.stages.rows.row_inputs import (
    RowInputs,
    build_model,
    check_auditable,
    last_trained,
    option_problems,
    read_rows,
    shown_mask,
)
from lightrft.stages.rows.row_stage import RowStage
from lightrft.stages.stage import TrainedModels
from lightrft.strategy.model_training import ModelTraining

if TYPE_CHECKING:
    from lightrft.strategy.backend import PreparedModel


@dataclass(frozen=True, slots=True)
class PreferenceInputs(RowInputs[Preference, KnownPreferences]):
    """Preferences of a run; see `RowInputs`.

    Args:
        stored: Sums of the reference, if they are read from a file.
    """

    stored: StoredReference | None = None

    @property
    def item_name(self) -> str:
        """Plural word for a preference."""
        return "pairs" if self.data.is_paired else "answers"

    def introduce(self, say: Callable[[str], None]) -> None:
        """Print what the model states, and the first item."""
        first = self.data.rows[0]
        self.reading.statements.say(say, last=last_trained(first.rows[0]))
        for row, is_good in zip(first.rows, first.labels, strict=True):
            name = "chosen" if is_good else "rejected"
            say(f"{name} in {shown_mask(row, self.reading.tokenizer)}")

    def load(
        self, config: RowRunOptions, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, PreferenceObjective]:
        """Load the model to train, and its frozen copy if the loss needs one.

        An adapted model without its adapters is its reference.
        """
        models, reference = build_model(config, training, num_steps), None
        loss = build_loss(config)
        if self.stored is None and loss.uses_reference and config.lora_rank == 0:
            path, new = str(config.pretrain), config.allow_new_weights
            read = partial(Actor.from_pretrained, path, allow_new_weights=new)
            reference = place_frozen(read, config, training.backend)
            require_equal_start(training.backend, models.main.model, reference)
        return models, PreferenceObjective(loss, reference)

    def prove(self, stage: RowStage[Preference, KnownPreferences]) -> None:
        """Prove that model and reference score alike; read or store the reference's sums."""
        objective = cast("PreferenceObjective", stage.objective)
        if (path := stored_path(stage.config)) is not None:
            stored = self._store(path, stage, objective).by_item(self.data.rows, self.held_out)
            stage.objective = objective = replace(objective, reference=None, stored=stored)
        objective.prove_equal_start(stage.data, stage.passes)

    def _store(
        self,
        path: Path,
        stage: RowStage[Preference, KnownPreferences],
        objective: PreferenceObjective,
    ) -> StoredReference:
        """Read the reference's sums, or compute and write them; collective.

        Raises:
            ConfigError: The file holds sums of another model.
        """
        backend, held_out = stage.strategy.backend, self.held_out
        origin = origin_of_data(self.data.rows, held_out, self.reading.tokenizer)
        origin = replace(
            origin, model=hash_of_start(cast("PreparedModel", stage.models.main.model), backend)
        )
        stored = self.stored
        if stored is None:
            kinds = (self.data.rows, held_out)
            stored = StoredReference(
                origin, *(objective.sums_of_all(each, stage.passes) for each in kinds)
            )
            if backend.context.is_rank_0():
                stored.save(path)
        require_origin(stored, origin, path)
        said = "written to" if self.stored is None else "read from"
        backend.context.print(f"the reference's log-probabilities were {said} {path}")
        return stored


def read_inputs(config: TrainConfig) -> PreferenceInputs:
    """Check the options, then read tokenizer and rows.

    Raises:
        ConfigError: Options that cannot be run.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer that cannot be read.
    """
    problems = preference_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError("\n".join(problems))
    reading, data, held_out = read_rows(config, load_preferences)
    problems = data_problems(config, data.rows, held_out)
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
    """Return the problems of the options for learning from preferences, one line each."""
    problems = option_problems(config, num_processes, "prefer")
    try:
        build_loss(config)
    except ConfigError as error:
        problems += str(error).splitlines()
    return problems


def data_problems(
    config: RowRunOptions, items: Sequence[Preference], held_out: Sequence[Preference]
) -> list[str]:
    """Return the reasons why the losses cannot be computed from this data, one line each."""
    problems = []
    size = config.train_batch_size
    loss = build_loss(config)
    of_pairs = [term.name for term in loss.terms if not term.traits.is_of_answers]
    num_answers = len(items[0].rows)
    if of_pairs and num_answers == 1:
        problems.append(
            f"preference_loss {' '.join(of_pairs)} compares two answers to a prompt, and the rows "
            "of prompt_data are labelled one by one: give pairs, or kto or apo_zero_unpaired"
        )
    if held_out and len(held_out[0].rows) != num_answers:
        problems.append("prompt_data and eval_data must both hold pairs, or both labelled answers")
    if loss.uses_kl and size < 2:
        problems.append(
            f"preference_loss kto compares with the other prompts of a step: it needs "
            f"train_batch_size >= 2, got {size}"
        )
    if config.ref_logprobs is not None and (loss.uses_kl or not loss.uses_reference):
        why = "scores answers to other prompts" if loss.uses_kl else "has no reference"
        problems.append(
            f"ref_logprobs: preference_loss {config.preference_loss[0]} {why}: leave it out"
        )
    return problems
