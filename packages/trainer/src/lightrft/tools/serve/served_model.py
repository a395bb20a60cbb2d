"""A model that answers calls of OpenAI's protocol by the embedded engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.media import Modality, TextModality
from lightrft.engines.factory import build_engine
from lightrft.engines.types import Completion, EngineConfig, GenerationRequest, SamplingParams
from lightrft.models import load_tokenizer
from lightrft.models.statements import read_statements
from lightrft.stages.start_checks import load_modality
from lightrft.tools.serve.chat_model import ChatModel


class ServedModel:
    """A model, its engine, and its chat interface.

    Args:
        path: Folder of the model.
        config: Defaults of sampling, and the format of calls.
        device: Device of the engine; None takes a GPU if there is one.

    Raises:
        ModelLoadError: The model cannot be read.
        TemplateRefusedError: It has no chat template that shows turns.
    """

    def __init__(self, path: Path, config: TrainConfig, *, device: str | None = None) -> None:
        tokenizer = load_tokenizer(str(path), config)
        statements = read_statements(str(path), config, tokenizer=tokenizer)
        self.statements = statements.require_consistent()
        self.engine = build_engine(
            EngineConfig(
                "hf",
                str(path),
                options={} if device is None else {"device": device},
                vocabulary=statements.vocabulary,
            )
        )
        modality: Modality = load_modality(replace(config, pretrain=str(path)), tokenizer)
        try:
            modality.check_turns()
        except ConfigError:  # serve text alone: no later turn could continue from images
            modality = TextModality(tokenizer)
        self.chat = ChatModel(tokenizer, config, self.engine.max_model_len, modality)

    def sample(self, how: SamplingParams, asked: list[GenerationRequest]) -> list[Completion]:
        """Sample completions for `answer_round`."""
        return self.engine.generate(asked, how)
