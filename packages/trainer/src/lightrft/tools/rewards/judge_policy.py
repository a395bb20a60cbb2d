"""The run's own policy as the judge, asked through the engine that samples responses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightrft.config import TrainConfig
from lightrft.datasets.suffix import TemplateRefusedError
from lightrft.engines.base import RolloutEngine
from lightrft.engines.types import Completion, GenerationRequest, SamplingParams
from lightrft.models import load_tokenizer
from lightrft.rewards.types import RewardError
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.http import HttpError
from lightrft.tools.serve.chat_model import NO_TURNS, ChatModel, judge_tokens


class JudgePolicy:
    """Requests of OpenAI's protocol to the engine of the run, with the weights of the step.

    It is asked between batches, when the engine samples nothing else, and a call asks all its
    questions at once. What the engine samples here is in no ledger: it is not trained on.

    Args:
        fields: Of every request, beside its messages.
        config: `pretrain` has the tokenizer.

    Attributes:
        shown: For errors.
        identity: Names the weights that answer.

    Raises:
        ConfigError: There is no chat template, or a field is refused.
    """

    keeps_weights = False

    def __init__(self, fields: Mapping[str, object], config: TrainConfig) -> None:
        bound = judge_tokens(fields)
        tokenizer = load_tokenizer(str(config.pretrain), config)
        try:
            chat = ChatModel(tokenizer, TrainConfig(generate_max_len=bound))
        except TemplateRefusedError as err:
            raise ConfigError(f"judge_model policy: {NO_TURNS} ({str(err)[:200]})") from err
        self._chat, self._rules = chat, chat.rules
        self._engine: RolloutEngine | None = None
        self._answers: dict[bytes, bytes | HttpError] = {}
        self._version = -1
        self.shown, self.identity = "policy", b"policy"

    def use_engine(self, engine: RolloutEngine) -> None:
        """Answers by this engine from now on."""
        self._engine = engine
        limit = engine.max_model_len or self._rules.max_tokens
        self._chat.rules = replace(self._rules, max_tokens=limit)

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | HttpError]:
        """See `JudgeModel.answers`.

        Raises:
            RewardError: There is no engine.
        """
        if self._engine is None:
            raise RewardError(
                "judge_model policy: only a run with an engine has a policy to ask: give "
                "--judge_model FOLDER here"
            )
        if self._version != self._engine.weights_version:
            self._answers, self._version = {}, self._engine.weights_version
        asked = [body for body in dict.fromkeys(bodies) if body not in self._answers]
        if asked:
            began = time.perf_counter()
            found = self._chat.answers(asked, self.shown, self._generate)
            num_sampled = sum(isinstance(each, bytes) for each in found)
            taken = time.perf_counter() - began
            seconds += [taken / num_sampled] * num_sampled if num_sampled else []
            for body, each in zip(asked, found, strict=True):
                self._answers[body] = each if isinstance(each, bytes) else HttpError(str(each))
        return [self._answers[body] for body in bodies]

    def _generate(
        self, requests: Sequence[GenerationRequest], how: SamplingParams
    ) -> list[Completion]:
        assert self._engine is not None
        return self._engine.generate(requests, how)

    def close(self) -> None:
        """Nothing: the engine is the run's."""
        self._engine = None
