"""A model that answers OpenAI's requests: their conversion for an engine, and of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.cli.errors import is_memory_error
from lightrft.config import ConfigError, RolloutOptions, TrainConfig
from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.media import Modality, TextModality
from lightrft.datasets.suffix import TurnSuffix
from lightrft.engines.factory import build_engine
from lightrft.engines.types import Completion, EngineConfig, GenerationRequest, SamplingParams
from lightrft.kernels.names import first_line
from lightrft.models import load_tokenizer
from lightrft.models.loading import ModelLoadError, is_reward_model
from lightrft.models.statements import read_statements
from lightrft.rollout.agents.conversations import AgentEpisode, CalledTurn, Conversations
from lightrft.rollout.agents.http_server import HttpError
from lightrft.rollout.agents.messages import read_chat, read_json
from lightrft.rollout.agents.replies import reply
from lightrft.rollout.agents.rounds import AnswerRules, ClientSampling
from lightrft.rollout.sampler import training_params
from lightrft.stages.start_checks import load_modality

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TURNS = (
    "its chat template renders no question with an answer, or there is none: judge with an "
    "instruct model"
)
Generate = Callable[[Sequence[GenerationRequest], SamplingParams], list[Completion]]


class ChatModel:
    """Requests to a model, and its answers.

    Args:
        tokenizer: Tokenizer of the model, with a chat template.
        config: Defaults of sampling, and the format of calls.
        limit: Longest question and answer, in tokens; None is unlimited.
        modality: Renderer and encoder of images; None is that of a text model.

    Attributes:
        rules: Rules of answers.

    Raises:
        TemplateRefusedError: The template shows no turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutOptions,
        limit: int | None = None,
        modality: Modality | None = None,
    ) -> None:
        self.chat_ids = ChatIds(tokenizer, modality)
        TurnSuffix(self.chat_ids)  # refuses templates without turns
        params = replace(training_params(config), n=1, seed=int(time.time()))
        sampling = ClientSampling(self.chat_ids.with_end_of_turn(params))
        self.tokenizer = tokenizer
        self.rules = AnswerRules(
            self.chat_ids, config.tool_parser, sampling, max_tokens=limit or 2**31
        )

    def episode(self) -> AgentEpisode:
        """Return an episode without calls."""
        talk = Conversations(self.chat_ids, 0, repeats_seeds=True)
        return AgentEpisode(0, None, 0, 0, {}, talk)  # type: ignore[arg-type]

    def answers(
        self, bodies: Sequence[bytes], name: str, generate: Generate
    ) -> list[bytes | HttpError]:
        """Answer questions that are independent of each other.

        Random numbers depend on seed and question, so equal questions have equal answers.

        Args:
            bodies: Bodies of the requests: one choice each, equal sampling options in all.
            name: Name of the model in the answers.
            generate: Function that samples completions; called once, unless all are refused.

        Returns:
            Body of each answer, or the error that refused the question.
        """
        asked: list[CalledTurn | HttpError] = []
        for body in bodies:
            try:
                asked += self.rules.asked(self.episode(), read_chat(read_json(body)))
            except HttpError as refusal:
                asked.append(refusal)
        turns = [each for each in asked if not isinstance(each, HttpError)]
        sampled = dict[int, Completion]()
        if turns:
            params = self.rules.sampling.params(turns[0].call.options)
            encoder = self.chat_ids.encoder
            requests = {turn.request_id: turn.request(turn.encoded(encoder)) for turn in turns}
            sampled = {made.request_id: made for made in generate([*requests.values()], params)}
        return [
            each
            if isinstance(each, HttpError)
            else self._told(each, sampled[each.request_id], name)
            for each in asked
        ]

    def _told(self, turn: CalledTurn, made: Completion, name: str) -> bytes:
        self.rules.finish(turn, made)
        return reply(turn.call, [turn], name, self.tokenizer).body


def judge_tokens(fields: Mapping[str, object]) -> int:
    """Return the token limit of a judge's answer.

    Args:
        fields: Fields of its requests, except for the messages.

    Raises:
        ConfigError: A field is not in the protocol, or has no effect on a whole answer.
    """
    talk = [{"role": "user", "content": "A question."}]
    try:
        options = read_chat({**fields, "messages": talk}).options
        ClientSampling(SamplingParams()).params(options)
    except HttpError as err:
        raise ConfigError(f"judge_args: {err}") from err
    if options.num_choices > 1 or options.is_streamed or options.wants_logprobs:
        raise ConfigError("judge_args: n, stream and logprobs: one answer is read, as a whole")
    return options.max_tokens or SamplingParams().max_tokens


class ServedModel:
    """A model, its engine, and its chat interface.

    Args:
        path: Folder of the model.
        config: Defaults of sampling, and the format of calls.

    Raises:
        ConfigError: It is a reward model.
        ModelLoadError: The model cannot be read.
        TemplateRefusedError: It has no chat template that shows turns.
    """

    def __init__(self, path: Path, config: TrainConfig) -> None:
        tokenizer = load_tokenizer(str(path), config)
        statements = read_statements(str(path), config, tokenizer=tokenizer)
        self.statements = statements.require_consistent()
        if is_reward_model(str(path)):
            raise ConfigError(f"{path} is a reward model: it scores answers and gives none")
        try:
            self.engine = build_engine(
                EngineConfig("hf", str(path), vocabulary=statements.vocabulary)
            )
        except Exception as error:  # bytes of files may fail anywhere in transformers
            if isinstance(error, ConfigError) or is_memory_error(error):
                raise
            raise ModelLoadError(f"cannot read the weights: {first_line(error)}") from error
        modality: Modality = load_modality(replace(config, pretrain=str(path)), tokenizer)
        try:
            modality.check_turns()
        except ConfigError:  # serve text alone: no later turn could continue from images
            modality = TextModality(tokenizer)
        self.chat = ChatModel(tokenizer, config, self.engine.max_model_len, modality)

    def sample(self, how: SamplingParams, asked: list[GenerationRequest]) -> list[Completion]:
        """Sample completions for `answer_round`."""
        return self.engine.generate(asked, how)
