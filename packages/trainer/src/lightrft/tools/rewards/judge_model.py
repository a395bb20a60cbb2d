"""Judges that are models of this machine: of a folder, in a process of its own, or the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from lightrft.config import ScorerOptions, ScoringOptions, TrainConfig
from lightrft.datasets.suffix import TemplateRefusedError
from lightrft.engines.base import RolloutEngine
from lightrft.models import load_tokenizer
from lightrft.rewards.process import WorkerFailedError, WorkerPool, WorkerTask, WorkerTimeoutError
from lightrft.rewards.types import RewardError
from lightrft.rewards.worker import ReportedError
from lightrft.run.provenance import fingerprint, tokenizer_hash
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.http import RequestError
from lightrft.tools.serve.chat_model import NO_TURNS, ChatModel, judge_tokens

# Of computing or waiting, for large weights on a slow disk.
START_SECONDS = 600.0


class JudgeModel:
    """Requests of OpenAI's protocol to a model that a worker process holds on the CPU.

    The worker answers one question after another, each by itself: an answer follows from the
    weights and its question alone, whatever was asked before it or beside it. It ends with the
    run, also when that is killed.

    Args:
        folder: Of the model, with a chat template.
        fields: Of every request, beside its messages.
        config: `reward_timeout_seconds` is the deadline of a call.

    Attributes:
        shown: For errors.
        identity: Bytes that other weights or another tokenizer change.

    Raises:
        ConfigError: There is no model, it cannot be loaded, or it refuses a field.
    """

    keeps_weights = True

    def __init__(self, folder: str, fields: Mapping[str, object], config: ScorerOptions) -> None:
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"judge_model: {folder} is no folder of a model: give one, of a run RUN/model, or "
                "--judge_url http://HOST:PORT/v1 for a server's model of this name"
            )
        bound = judge_tokens(fields)
        self.shown, self._seconds = folder, config.reward_timeout_seconds
        self.identity = f"{fingerprint(path)} {tokenizer_hash(path)}".encode()
        task = WorkerTask(__name__, "JudgeWorker", (folder, bound), start_seconds=START_SECONDS)
        self.workers = WorkerPool(task, size=1, name="judge")
        try:
            self.workers.start()
        except WorkerFailedError as err:
            self.close()
            raise ConfigError(f"judge_model: {folder}: {err}") from err

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | RequestError]:
        """The body of each answer, or what went wrong with it; one deadline for all.

        Args:
            bodies: Of the requests.
            seconds: Receives how long each answer took.
        """
        left, found = self._seconds, list[bytes | RequestError]()
        problem: RequestError | None = None
        for body in bodies:
            if problem is None:
                try:
                    answer, taken = cast(
                        "tuple[str, float]", self.workers.call(body, seconds=max(left, 0.0))
                    )
                except WorkerTimeoutError:
                    problem = RequestError(
                        f"{len(bodies)} questions were not answered within {self._seconds:g} s: "
                        "raise --reward_timeout_seconds"
                    )
                except WorkerFailedError as err:
                    refusal = RequestError(str(err))
                    if err.kind:  # of this question; the worker lives
                        found.append(refusal)
                        continue
                    problem = refusal
                else:
                    left -= taken
                    seconds.append(taken)
                    found.append(answer.encode())
                    continue
            found.append(problem)
        return found

    def close(self) -> None:
        """Ends the worker; may be called twice."""
        self.workers.close()


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

    def __init__(self, fields: Mapping[str, object], config: ScoringOptions) -> None:
        bound = judge_tokens(fields)
        tokenizer = load_tokenizer(str(config.pretrain), config)
        try:
            chat = ChatModel(tokenizer, TrainConfig(generate_max_len=bound))
        except TemplateRefusedError as err:
            raise ConfigError(f"judge_model policy: {NO_TURNS} ({str(err)[:200]})") from err
        self._chat, self._rules = chat, chat.rules
        self._engine: RolloutEngine | None = None
        self._answers: dict[bytes, bytes | RequestError] = {}
        self._version = -1
        self.shown, self.identity = "policy", b"policy"

    def use_engine(self, engine: RolloutEngine) -> None:
        """Answers by this engine from now on."""
        self._engine = engine
        limit = engine.max_model_len or self._rules.max_tokens
        self._chat.rules = replace(self._rules, max_tokens=limit)

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | RequestError]:
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
            found = self._chat.answers(asked, self.shown, self._engine.generate)
            num_sampled = sum(isinstance(each, bytes) for each in found)
            taken = time.perf_counter() - began
            seconds += [taken / num_sampled] * num_sampled if num_sampled else []
            for body, each in zip(asked, found, strict=True):
                self._answers[body] = each if isinstance(each, bytes) else RequestError(str(each))
        return [self._answers[body] for body in bodies]

    def close(self) -> None:
        """Nothing: the engine is the run's."""
        self._engine = None


class JudgeWorker:
    """The model, in the worker.

    Args:
        folder: Of the model.
        max_tokens: Most that a request asks for.

    Raises:
        ReportedError: The model cannot be loaded, or shows no turns.
    """

    def __init__(self, folder: str, max_tokens: int) -> None:
        from lightrft.cli.launch import hide_progress_bars
        from lightrft.tools.serve.served_model import ServedModel

        hide_progress_bars()
        config = TrainConfig(generate_max_len=max_tokens)
        try:
            model = ServedModel(Path(folder), config, device="cpu")
        except TemplateRefusedError as err:
            raise ReportedError(f"{NO_TURNS} ({str(err)[:200]})") from err
        except (OSError, ValueError, RuntimeError) as err:
            raise ReportedError(f"the model cannot be loaded: {str(err)[:300]}") from err
        self._model, self._name = model, folder

    def describe(self) -> object:
        """Nothing to say."""
        return None

    def __call__(self, request: object) -> tuple[str, float]:
        """The answer to the body of one request, and how long it took."""
        began = time.perf_counter()
        [answer] = self._model.chat.answers(
            [cast("bytes", request)], self._name, self._model.engine.generate
        )
        if not isinstance(answer, bytes):
            raise ReportedError(str(answer)) from answer
        return answer.decode(), time.perf_counter() - began
