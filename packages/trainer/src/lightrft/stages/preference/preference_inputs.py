"""Inputs of learning from preferences: options and rows, checked first, then built with models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import nn

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.preference_rows import Preference, PreferenceRows, load_preferences
from lightrft.models import Actor
from lightrft.models.sequence_model import freeze
from lightrft.stages.policy.models import (
    configure_model,
    load_policy,
    require_equal_start,
    trained_model,
)
from lightrft.stages.preference.preference_objective import build_objective
from lightrft.stages.preference.preference_stage import PreferenceStage, prompt_ids
from lightrft.stages.stage import TrainedModels
from lightrft.stages.supervised.supervised_inputs import (
    decided_for_rows,
    option_problems,
    read_rows,
    shown_mask,
    warn_of_end,
)
from lightrft.stages.supervised.supervised_stage import planned_updates
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PreferenceInputs:
    """Preferences of a run; see `StageInputs`."""

    tokenizer: PreTrainedTokenizerBase
    data: PreferenceRows
    held_out: tuple[Preference, ...] = ()

    def decided(self, config: TrainConfig, strategy: StrategyBase) -> TrainConfig:
        """See `StageInputs`."""
        return decided_for_rows(config, strategy)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> PreferenceStage:
        """See `StageInputs`."""
        num_steps = planned_updates(self.data, config, strategy)
        strategy.print(self.data.summary)
        first = self.data.rows[0]
        for row, is_good in zip(first.rows, first.labels, strict=True):
            name = "chosen" if is_good else "rejected"
            strategy.print(f"{name} in {shown_mask(row, self.tokenizer)}")
        kind = "pairs" if self.data.is_paired else "answers"
        strategy.print(f"{num_steps} steps of {config.train_batch_size} {kind}")
        trained = {prompt_ids(item.rows[0]).tobytes() for item in self.data.rows}
        known = sum(prompt_ids(item.rows[0]).tobytes() in trained for item in self.held_out)
        if known:
            strategy.print(
                f"warning: the prompts of {known} of {len(self.held_out)} held-out {kind} are "
                "trained on, too: the evaluation says less about others"
            )
        with phase("load the model", timedelta(minutes=config.timeout_minutes)):
            models, reference = build_models(config, strategy, num_steps)
        stage = PreferenceStage(config, strategy, models, reference, self.data, self.held_out)
        stage.text_part = self.tokenizer
        module = strategy.unwrap_model(models.main.model)
        if isinstance(module, Actor):
            warn_of_end(first.rows[0], self.tokenizer, module, strategy.print)
        with phase("score the first rows", timedelta(minutes=config.timeout_minutes)):
            stage.prove_equal_start()
        return stage

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
    tokenizer, data, found = read_rows(config, load_preferences)
    held_out = () if found is None else found.rows
    problems = data_problems(config, data, held_out)
    if problems:
        raise ConfigError("\n".join(problems))
    return PreferenceInputs(tokenizer, data, held_out)


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
    return found


def build_models(
    config: TrainConfig, strategy: StrategyBase, max_steps: int
) -> tuple[TrainedModels, nn.Module | None]:
    """Loads and prepares the model that is trained, and its frozen copy where one is needed.

    Without its adapters an adapted model is its own reference.

    Args:
        config: Its path and options.
        strategy: Prepares them.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    path, reference = str(config.pretrain), None
    with strategy.init_model_context(config.meta_init):
        actor = load_policy(path, config)
        if build_objective(config).uses_reference and config.lora_rank == 0:
            reference = Actor.from_pretrained(path, allow_new_weights=config.allow_new_weights)
    configure_model(actor, config)
    freeze(actor, config.freeze_prefix)
    if reference is not None:
        configure_model(reference, config)
    ready, _, _, ready_reference = strategy.prepare_models_and_optimizers(
        actor, None, None, reference, config, max_steps
    )
    if ready_reference is not None:
        require_equal_start(strategy, ready, ready_reference)
    return TrainedModels((trained_model("actor", ready),)), ready_reference
