"""Inputs of a stage over rows: options and rows, checked first, then built with the model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Generic

import numpy as np
from transformers import AutoModelForCausalLM

from lightrft.config import BuildOptions, ConfigError, RowDataOptions, RowRunOptions, TrainConfig
from lightrft.config.train_config import DISTILLED_ROWS, DISTILLED_ROWS_AND_SAMPLES, batch_problems
from lightrft.datasets.prompt_sampler import build_sampler
from lightrft.datasets.row_data import Item, RowData, RowMediaReader, SupervisedRow
from lightrft.datasets.row_origin import check_tokens
from lightrft.engines.media.families import family_of, placeholder_ids
from lightrft.models import load_tokenizer
from lightrft.models.loading import load_config
from lightrft.models.statements import Statements, read_statements
from lightrft.stages.models import (
    configure_trained,
    load_policy,
    prove_models,
    trained_model,
)
from lightrft.stages.rows.row_objective import Known, RowObjective
from lightrft.stages.rows.row_stage import RowStage, num_updates, row_choice
from lightrft.stages.stage import TrainedModels
from lightrft.stages.start_checks import (
    check_parts,
    decide_by_files,
    load_modality,
    rows_within_context,
    shared_prompts,
)
from lightrft.strategy.backend import Backend
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.model_training import ModelTraining
from lightrft.strategy.strategy_base import StrategyBase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass


_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class RowReading:
    """Parts of a model that read rows.

    Args:
        tokenizer: Tokenizer of the model.
        statements: Statements of the model about its tokens.
        reader: Reader of images and videos in rows.
    """

    tokenizer: PreTrainedTokenizerBase
    statements: Statements
    reader: RowMediaReader

    @property
    def vocab_size(self) -> int:
        """Number of ids that rows may hold."""
        return self.statements.vocab_size

    @property
    def text_part(self) -> object:
        """Processor or tokenizer to save beside the model."""
        return self.reader.modality.processor or self.tokenizer


@dataclass(frozen=True, slots=True)
class RowInputs(ABC, Generic[Item, Known]):
    """Items of a run; see `StageInputs`. Subclasses build model and objective.

    Args:
        reading: Parts that read the rows.
        data: Items to train on.
        held_out: Items to evaluate on.
    """

    reading: RowReading
    data: RowData[Item]
    held_out: tuple[Item, ...] = ()

    @property
    def item_name(self) -> str:
        """Plural word for an item."""
        return "rows"

    def decided(self, config: TrainConfig, backend: Backend) -> TrainConfig:
        """Return the configuration with the machine's choices; logits stay fused unless set."""
        if config.fused_linear_logprob is None:
            config = config.replaced({"fused_linear_logprob": True})
        return decide_by_files(config, backend)

    def build(self, config: TrainConfig, strategy: StrategyBase) -> RowStage[Item, Known]:
        """Build model, data and objective of the stage."""
        num_steps = num_updates(len(self.data), config, strategy.world_size)
        strategy.print(self.data.summary)
        self.introduce(strategy.print)
        strategy.print(f"{num_steps} steps of {config.train_batch_size} {self.item_name}")
        held_out = [item.rows[0].prompt_key for item in self.held_out]
        trained = (item.rows[0].prompt_key for item in self.data.rows)
        for line in shared_prompts(trained, held_out, self.item_name):
            strategy.print(line)
        with phase("load the models", timedelta(minutes=config.timeout_minutes)):
            models, objective = self.load(config, strategy.training, num_steps)
        if objective.syncs_engine:
            model = models.main.model
            each = (model, *objective.frozen)
            config = prove_models(config, strategy.context, each, kept=objective.kept_dropout)
            strategy.setup_inference_engine(config, config.engine_type, actor=model)
        stage = RowStage(config, strategy, models, self.data, self.held_out, objective)
        stage.text_part = self.reading.text_part
        with phase("score the first rows", timedelta(minutes=config.timeout_minutes)):
            self.prove(stage)
        return stage

    def introduce(self, say: Callable[[str], None]) -> None:
        """Print what the model states and what the data hold."""
        self.reading.statements.say(say)

    @abstractmethod
    def load(
        self, config: TrainConfig, training: ModelTraining, num_steps: int
    ) -> tuple[TrainedModels, RowObjective[Item, Known]]:
        """Load and prepare the models, and build the objective; collective."""

    def prove(self, stage: RowStage[Item, Known]) -> None:
        """Prove what must hold before the first step; collective."""
        return

    def items(self) -> Sequence[Sequence[SupervisedRow]]:
        """Return the rows to train on, grouped by item."""
        return [item.rows for item in self.data.rows]

    def media_digests(self) -> Iterator[bytes]:
        """Return the hashes of the rows' media."""
        return (each for item in self.items() for row in item for each in row.media_digests)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


def check_auditable(config: RowRunOptions, rows: Iterable[SupervisedRow]) -> None:
    """Raise a ConfigError if steps on these rows are to be recorded but cannot be recomputed."""
    if config.audit_every and any(row.shown for row in rows):
        raise ConfigError("audit_every recomputes rows of text, and some have images: leave it out")
    if config.audit_every and family_of(load_config(str(config.pretrain))) is not None:
        raise ConfigError(
            "audit_every recomputes models of text, and pretrain has towers: leave it out"
        )


def require_options(config: TrainConfig, command: str) -> None:
    """Raise a ConfigError that lists the problems of the options; see `option_problems`."""
    problems = option_problems(config, int(os.environ.get("WORLD_SIZE", "1")), command)
    if problems:
        raise ConfigError("\n".join(problems))


def read_rows(
    config: TrainConfig,
    load: Callable[..., RowData[Item]],
    kind: type[_BaseAutoModelClass] = AutoModelForCausalLM,
) -> tuple[RowReading, RowData[Item], tuple[Item, ...]]:
    """Read the items to train on and the held-out ones; return them with their reading parts.

    Args:
        config: Options of the run.
        load: Function that reads rows; its arguments are those of `load_supervised`.
        kind: Kind of the trained model.

    Raises:
        ConfigError: The model is of another kind or lacks layers that options name, or there are
            fewer rows than a step takes.
        DataError: Rows that cannot be used.
        ModelLoadError: A tokenizer or processor that cannot be read.
    """
    reading = read_vocabulary(config, generates=kind is AutoModelForCausalLM)
    reading_args = {"vocab_size": reading.vocab_size, "reader": reading.reader}
    config = config.replaced(rows_within_context(config))
    check_parts(config, kind)
    data = load(
        str(config.prompt_data),
        reading.tokenizer,
        config,
        max_samples=config.max_samples,
        split=config.prompt_split,
        probabilities=config.prompt_data_probs,
        **reading_args,
    )
    if len(data) < config.train_batch_size:
        raise ConfigError(
            f"{config.prompt_data} has {len(data)} usable rows, less than one step takes: lower "
            f"train_batch_size (got {config.train_batch_size}) or give more rows"
        )
    build_sampler(config, row_choice(data, config))  # refused before the models are loaded
    if config.eval_data is None:
        return reading, data, ()
    held_out = load(
        config.eval_data,
        reading.tokenizer,
        config.replaced({"prompt_weight": None}),
        max_samples=config.max_eval_samples,
        split=config.eval_split,
        **reading_args,
    )
    return reading, data, held_out.rows


def read_vocabulary(config: RowDataOptions, *, generates: bool = True) -> RowReading:
    """Return the parts that read the rows for the model of `pretrain`.

    Args:
        config: Options of the run.
        generates: Whether the model writes answers; False for scores.

    Raises:
        ConfigError: An option does not fit the model, or its files contradict each other.
        DataError: Ids in `prompt_data` or `eval_data` are of another tokenizer.
        ModelLoadError: The tokenizer or processor is missing or unreadable.
    """
    path = str(config.pretrain)
    model_config = load_config(path)
    tokenizer = load_tokenizer(path, config)
    statements = read_statements(path, config, tokenizer=tokenizer, generates=generates)
    statements.require_consistent()
    for sources in filter(None, (config.prompt_data, config.eval_data)):
        check_tokens(sources, tokenizer)
    modality = load_modality(config, tokenizer)
    reader = RowMediaReader(modality, placeholder_ids(model_config))
    return RowReading(tokenizer, statements, reader)


def option_problems(config: TrainConfig, num_processes: int, command: str) -> list[str]:
    """Return the problems of the options for training on rows, one line each.

    Args:
        config: Options of the run.
        num_processes: Number of processes of the run.
        command: Name of the training command.
    """
    if command == "distill":
        samples = config.offpolicy_fraction < 1
        command = DISTILLED_ROWS_AND_SAMPLES if samples else DISTILLED_ROWS
    problems = config.missing_inputs + config.refused_options(command)
    alike = {"rollout_batch_size": config.train_batch_size, "n_samples_per_prompt": 1}
    lines = batch_problems(TrainConfig(**{**config.__dict__, **alike}), num_processes)
    return problems + [line.replace("rollout_batch_size", "train_batch_size") for line in lines]


def build_model(config: BuildOptions, training: ModelTraining, max_steps: int) -> TrainedModels:
    """Load and prepare the model to train.

    Args:
        config: Path and options of the model.
        training: Strategy part that prepares it.
        max_steps: Optimizer steps of the run, for the learning rate schedule.
    """
    with training.backend.init_model_context(config.meta_init):
        actor = load_policy(str(config.pretrain), config)
    configure_trained(actor, config, training.context)
    ready, _ = training.prepare_models(actor, max_steps=max_steps)
    return TrainedModels((trained_model("actor", ready),))


def last_trained(row: SupervisedRow) -> int:
    """Return the last trained token of a row."""
    return int(row.token_ids[row.is_trained][-1])


def shown_mask(row: SupervisedRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the beginning of a row as text, with the trained parts between >> and <<."""
    text = marked_text(row, tokenizer)
    cut = "..." if len(text) > _SHOWN_CHARACTERS else ""
    return f"the first row, what is trained between >> and <<: {text[:_SHOWN_CHARACTERS]!r}{cut}"


def marked_text(row: SupervisedRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a row as text, with the trained parts between >> and <<."""
    changes = np.flatnonzero(row.is_trained[1:] != row.is_trained[:-1]) + 1
    edges = [0, *changes.tolist(), len(row.token_ids)]
    text = ""
    for start, stop in pairwise(edges):
        piece = tokenizer.decode(row.token_ids[start:stop].tolist())
        text += f">>{piece}<<" if row.is_trained[start] else piece
    return text
