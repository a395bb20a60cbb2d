"""A model of a folder that answers calls of OpenAI's protocol by the embedded engine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lightrft.config import TrainConfig
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.suffix import TurnSuffix
from lightrft.engines.factory import build_engine
from lightrft.engines.types import Completion, EngineConfig, GenerationRequest, SamplingParams
from lightrft.models import load_tokenizer
from lightrft.rollout.agents.conversations import Conversations
from lightrft.rollout.agents.episodes import AgentEpisode
from lightrft.rollout.agents.rounds import AnswerRules
from lightrft.rollout.agents.sampling import ClientSampling
from lightrft.rollout.sampler import training_params


class ServedModel:
    """A model and the way that its answers are sampled and read.

    Args:
        path: Folder of the model.
        config: Sampling where clients say nothing, and the format of calls.
        device: Of the engine; None takes a GPU where there is one.

    Raises:
        ModelLoadError: The model cannot be read.
        TemplateRefusedError: It has no chat template that shows turns.
    """

    def __init__(self, path: Path, config: TrainConfig, *, device: str | None = None) -> None:
        tokenizer = load_tokenizer(str(path), config)
        options = {} if device is None else {"device": device}
        self.engine = build_engine(EngineConfig("hf", str(path), options=options))
        end = TurnSuffix(tokenizer).verdict.end_of_turn
        params = replace(training_params(config), n=1, seed=int(time.time()))
        if end is not None:
            params = replace(params, stop_token_ids=(end,))
        ends = [each for each in (end, tokenizer.eos_token_id) if each is not None]
        limit = self.engine.max_model_len
        self.tokenizer, self._chat = tokenizer, ChatIds(tokenizer, end)
        self.rules = AnswerRules(
            tokenizer,
            config.tool_parser,
            frozenset(ends),
            ClientSampling(params),
            max_tokens=limit or 2**31,
        )

    def episode(self) -> AgentEpisode:
        """An episode without calls."""
        talk = Conversations(self._chat, 0)
        return AgentEpisode(0, None, 0, 0, {}, talk)  # type: ignore[arg-type]

    def sample(self, how: SamplingParams, asked: list[GenerationRequest]) -> list[Completion]:
        """Completions, as `answer_round` takes them."""
        return self.engine.generate(asked, how)
