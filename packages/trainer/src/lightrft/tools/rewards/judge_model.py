"""A judge of a folder: a model in a process of its own, which each rank has beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from lightrft.config import TrainConfig
from lightrft.rewards.process import WorkerFailedError, WorkerPool, WorkerTask, WorkerTimeoutError
from lightrft.rewards.worker import ReportedError
from lightrft.run.provenance import fingerprint, tokenizer_hash
from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards.http import HttpError
from lightrft.tools.serve.chat_model import NO_TURNS, judge_tokens

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

    def __init__(self, folder: str, fields: Mapping[str, object], config: TrainConfig) -> None:
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
        self._workers = WorkerPool(task, size=1, name="judge")
        try:
            self._workers.start()
        except WorkerFailedError as err:
            self.close()
            raise ConfigError(f"judge_model: {folder}: {err}") from err

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | HttpError]:
        """The body of each answer, or what went wrong with it; one deadline for all.

        Args:
            bodies: Of the requests.
            seconds: Receives how long each answer took.
        """
        left, found = self._seconds, list[bytes | HttpError]()
        problem: HttpError | None = None
        for body in bodies:
            if problem is None:
                try:
                    answer, taken = cast(
                        "tuple[str, float]", self._workers.call(body, seconds=max(left, 0.0))
                    )
                except WorkerTimeoutError:
                    problem = HttpError(
                        f"{len(bodies)} questions were not answered within {self._seconds:g} s: "
                        "raise --reward_timeout_seconds"
                    )
                except WorkerFailedError as err:
                    refusal = HttpError(str(err))
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
        self._workers.close()


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
        from lightrft.datasets.suffix import TemplateRefusedError
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
