"""Judges that run on this machine: a model of a folder in a worker process, or the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from lightrft.config import ScorerOptions, ScoringOptions, TrainConfig
from lightrft.datasets.chat_ids import TemplateRefusedError
from lightrft.engines.base import RolloutEngine
from lightrft.models import load_tokenizer
from lightrft.rewards.process import WorkerFailedError, WorkerPool, WorkerTask, WorkerTimeoutError
from lightrft.rewards.types import RewardError
from lightrft.rewards.worker import ReportedError
from lightrft.run.provenance import fingerprint, tokenizer_hash
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.http import RequestError
from lightrft.tools.serve.chat_model import NO_TURNS, ChatModel, judge_tokens

# Limit of the start in computing or waiting time: large weights on a slow disk take long.
START_SECONDS = 600.0


class JudgeModel:
    """Judge of a folder, in a worker process on the CPU; takes requests of OpenAI's protocol.

    The worker answers one question at a time. An answer depends only on the weights and its
    question, not on other questions. The worker ends with the run, also when that is killed.

    Args:
        folder: Folder of the model, with a chat template.
        fields: Fields of every request, beside its messages.
        config: Options; `reward_timeout_seconds` is the deadline of a call.

    Attributes:
        shown: Name for errors.
        identity: Bytes that change with the weights and the tokenizer.

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
        """Return the body or error of each answer; one deadline for all.

        Args:
            bodies: Bodies of the requests.
            seconds: List that receives the time of each answer.
        """
        left, answers = self._seconds, list[bytes | RequestError]()
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
                    if err.kind:  # only this question failed; the worker lives
                        answers.append(refusal)
                        continue
                    problem = refusal
                else:
                    left -= taken
                    seconds.append(taken)
                    answers.append(answer.encode())
                    continue
            answers.append(problem)
        return answers

    def close(self) -> None:
        """End the worker; may be called twice."""
        self.workers.close()


class JudgePolicy:
    """The policy as judge: requests of OpenAI's protocol to the run's engine and current weights.

    Calls come between batches, when the engine samples nothing else, and send all their questions
    at once. The ledger does not count these samples: they are not trained on.

    Args:
        fields: Fields of every request, beside its messages.
        config: Options; `pretrain` names the tokenizer.

    Attributes:
        shown: Name for errors.
        identity: Name of the weights that answer.

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
        """Answer with this engine from now on."""
        self._engine = engine
        limit = engine.max_model_len or self._rules.max_tokens
        self._chat.rules = replace(self._rules, max_tokens=limit)

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | RequestError]:
        """Return the body or error of each answer.

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
            answers = self._chat.answers(asked, self.shown, self._engine.generate)
            num_sampled = sum(isinstance(each, bytes) for each in answers)
            taken = time.perf_counter() - began
            seconds += [taken / num_sampled] * num_sampled if num_sampled else []
            for body, each in zip(asked, answers, strict=True):
                self._answers[body] = each if isinstance(each, bytes) else RequestError(str(each))
        return [self._answers[body] for body in bodies]

    def close(self) -> None:
        """Forget the engine, which belongs to the run."""
        self._engine = None


class JudgeWorker:
    """The model in the worker.

    Args:
        folder: Folder of the model.
        max_tokens: Largest number of tokens that a request asks for.

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
        """Return nothing: there is nothing to report."""
        return None

    def __call__(self, request: object) -> tuple[str, float]:
        """Return the answer to the body of one request, and its time in seconds."""
        began = time.perf_counter()
        [answer] = self._model.chat.answers(
            [cast("bytes", request)], self._name, self._model.engine.generate
        )
        if not isinstance(answer, bytes):
            raise ReportedError(str(answer)) from answer
        return answer.decode(), time.perf_counter() - began
