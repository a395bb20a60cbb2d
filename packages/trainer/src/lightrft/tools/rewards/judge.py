"""Grades and comparisons by a judge, on an OpenAI-compatible server, or by the policy.

A response stands between two marks that hold a hash of it, so it cannot contain them. The judge
ends its answer with a line of a fixed form. Any other answer is an error, never a score.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightrft.config import ConfigError, ScorerOptions, ScoringOptions, TrainConfig
from lightrft.config.files import FileError, lines_of, parse_object
from lightrft.config.printable import one_line
from lightrft.datasets.chat_ids import TemplateRefusedError
from lightrft.engines.base import RolloutEngine
from lightrft.engines.media.media import Media
from lightrft.models import load_tokenizer
from lightrft.rewards.types import (
    MEDIA_COLUMNS,
    Columns,
    Labels,
    RewardError,
    RewardResult,
    Tallies,
    Texts,
)
from lightrft.tools.rewards.http import (
    ClientRequest,
    HttpClient,
    RequestError,
    RequestLimits,
    json_headers,
    parse_json,
    shown_address,
)
from lightrft.tools.rewards.judge_questions import JudgedPrompt, Question, load_grading
from lightrft.tools.rewards.remote import service_address
from lightrft.tools.serve.chat_model import NO_TURNS, ChatModel, judge_tokens

KEY_VARIABLE = "LIGHTRFT_JUDGE_KEY"
CACHE_FOLDER = "judge_cache"
MAX_ANSWER_BYTES, CONCURRENCY = 1 << 20, 16
_TOKENS = ("prompt_tokens", "completion_tokens")
_COUNTS = ("questions", "cached", "requests", "seconds", *_TOKENS)


class _ServedJudge:
    """A judge behind an address, which takes requests of OpenAI's protocol.

    Args:
        url: Address of the server, up to `/v1`.
        config: Options; `reward_timeout_seconds` is the deadline of a call.

    Attributes:
        shown: Name for errors.
        identity: Bytes that change with the judge.
    """

    keeps_weights = True

    def __init__(self, url: str, config: ScorerOptions) -> None:
        base = service_address(url, option="judge_url").rstrip("/")
        self._url = f"{base}/chat/completions"
        self.shown, self.identity = shown_address(self._url), self._url.encode()
        self._headers = json_headers(os.environ.get(KEY_VARIABLE))
        self._client = HttpClient(
            RequestLimits(
                config.reward_timeout_seconds, max_bytes=MAX_ANSWER_BYTES, concurrency=CONCURRENCY
            ),
            uses_environment=True,
        )

    def answers(
        self, bodies: Sequence[bytes], *, seconds: list[float]
    ) -> Sequence[bytes | RequestError]:
        """Return the body or error of each answer; one deadline for all.

        Args:
            bodies: Bodies of the requests.
            seconds: List that receives the time of each answer.
        """
        requests = [ClientRequest(self._url, body, headers=self._headers) for body in bodies]
        return self._client.fetch_all(requests, seconds=seconds)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


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
                "--judge_url here"
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


class JudgeReward:
    """Grades of the judge divided by 10, or how a response compares with others to its prompt.

    Earlier answers come from a cache in the run's folder. Its key is a hash of the request and of
    the judge's address, so a changed question never gets an old answer.

    Args:
        config: Options `judge_*`, `reward_timeout_seconds` as the deadline of one call, and
            `output_dir`, which holds the cache if that folder exists.
        name: Name of the reward and of its component.

    Raises:
        ConfigError: No judge, or a template that cannot be used.
    """

    needs_labels = False

    def __init__(self, config: ScoringOptions, name: str = "judge") -> None:
        self.name = name
        if config.judge_model is None or not (config.judge_url or config.judges_by_policy):
            raise ConfigError(
                "the reward judge needs --judge_url http://HOST:PORT/v1 and --judge_model NAME "
                "(lightrft serve FOLDER gives a model an address), or --judge_model policy for the "
                "one that is trained"
            )
        # The engine answers all questions of a rank at once; other judges get CONCURRENCY requests.
        self.whole_batch = config.judges_by_policy
        self.parallel_calls = 0 if config.judges_by_policy else CONCURRENCY
        self._grading = load_grading(
            name, config.judge_compare, config.judge_template, config.judge_rubric
        )
        # Sums since they were last taken; several threads add to them.
        self._counts, self._lock = dict.fromkeys(_COUNTS, 0.0), threading.Lock()
        self._fields: dict[str, object] = {
            "model": config.judge_model,
            "temperature": 0,
            "max_tokens": 1024,
            "seed": 0,
            "n": 1,
            **(config.judge_args or {}),
        }
        self.server: _ServedJudge | JudgePolicy
        if config.judge_url is not None:
            self.server = _ServedJudge(config.judge_url, config)
        else:
            self.server = JudgePolicy(self._fields, config)
        self._cache = AnswerCache(Path(config.output_dir) / CACHE_FOLDER)

    def use_engine(self, engine: RolloutEngine) -> None:
        """Answer with this engine if the policy is the judge."""
        if isinstance(self.server, JudgePolicy):
            self.server.use_engine(engine)

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """Return the result of each response."""
        if not self.server.keeps_weights:
            self._cache = AnswerCache(None)
        media_columns = [columns[name] for name in MEDIA_COLUMNS if name in columns]
        media = [Media()] * len(responses)
        for column in media_columns:
            more = [value if isinstance(value, Media) else Media() for value in column]
            media = [one + another for one, another in zip(media, more, strict=True)]

        def ask(questions: Sequence[Question]) -> list[str]:
            bodies = [self._body(each.text, media[each.index]) for each in questions]
            return self._answers(questions, bodies)

        tasks = [JudgedPrompt(prompt, label) for prompt, label in zip(prompts, labels, strict=True)]
        return self._grading.grade(tasks, responses, ask)

    def take_tallies(self) -> Tallies:
        """Return the costs since the last call."""
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(_COUNTS, 0.0)
        requests = counts["requests"]
        tallies: dict[str, tuple[float, float | None]] = {
            **{name: (counts[name], requests) for name in (*_TOKENS, "seconds")},
            "cached_share": (counts["cached"], counts["questions"]),
            "requests": (requests, None),
        }
        return {f"{self.name}/{name}": value for name, value in tallies.items()}

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def close(self) -> None:
        """Close the judge; may be called twice."""
        self.server.close()

    def _body(self, text: str, media: Media) -> bytes:
        content: object = text
        if media:
            shown = [_part(address) for address in media.data_addresses()]
            content = [*shown, {"type": "text", "text": text}]
        request = {**self._fields, "messages": [{"role": "user", "content": content}]}
        return json.dumps(request, sort_keys=True, allow_nan=False).encode()

    def _answers(self, questions: Sequence[Question], bodies: Sequence[bytes]) -> list[str]:
        """Return a usable answer to each question.

        Raises:
            RewardError: An answer is not usable.
        """
        start = self.server.identity + b"\0"
        keys = [hashlib.sha256(start + body).hexdigest() for body in bodies]
        asked = {
            key: (question, body)
            for key, question, body in zip(keys, questions, bodies, strict=True)
            if not self._is_known(key, question)
        }
        self._count(questions=len(questions), cached=sum(key not in asked for key in keys))
        problems = self._ask(asked)
        for key, question in zip(keys, questions, strict=True):
            if key in problems:
                others = f" ({len(problems)} answers like it)" if len(problems) > 1 else ""
                where = f"judge {self.server.shown}, sample {question.index}"
                raise RewardError(f"{where}: {problems[key]}{others}")
        return [self._cache.get(key) or "" for key in keys]

    def _is_known(self, key: str, question: Question) -> bool:
        answer = self._cache.get(key)
        if answer is None:
            return False
        try:
            question.read(answer)
        except ValueError:
            return False
        return True

    def _ask(self, asked: Mapping[str, tuple[Question, bytes]]) -> dict[str, str]:
        """Put usable answers into the cache; return the problems of the others by key."""
        seconds: list[float] = []
        bodies = [body for _, body in asked.values()]
        answers = self.server.answers(bodies, seconds=seconds) if bodies else []
        self._count(requests=len(seconds), seconds=sum(seconds))
        problems: dict[str, str] = {}
        for (key, (question, _)), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, RequestError):
                problems[key] = str(answer)
                continue
            try:
                content, prompt_tokens, completion_tokens = read_completion(answer)
                self._count(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
                question.read(content)
            except ValueError as err:
                problems[key] = str(err)
            else:
                self._cache.put(key, content)
        return problems


def read_completion(answer: bytes) -> tuple[str, int, int]:
    """Return the text of a chat completion, its prompt's tokens and its own; 0 if not counted.

    Raises:
        ValueError: The body is no chat completion, is incomplete, or has no text; one line.
    """
    completion = parse_json(answer)
    choices = completion.get("choices") if isinstance(completion, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        said = one_line(answer[:200].decode(errors="replace"))
        raise ValueError(f"the answer is no chat completion: {said!r}")
    reason, content = choice.get("finish_reason"), message.get("content")
    if reason == "length":
        raise ValueError("the answer was cut at its limit: raise --judge_args max_tokens=N")
    if reason not in (None, "stop", "eos"):
        raise ValueError(f"the answer ended for the reason {one_line(repr(reason))[:60]}")
    if not isinstance(content, str):
        raise ValueError(f"the answer has no text: content is {type(content).__name__}")
    usage = completion.get("usage") if isinstance(completion, dict) else None
    counts = usage if isinstance(usage, dict) else {}
    prompt_tokens, completion_tokens = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return (
        content,
        prompt_tokens if isinstance(prompt_tokens, int) else 0,
        completion_tokens if isinstance(completion_tokens, int) else 0,
    )


class AnswerCache:
    """Texts by key; each rank appends to its file and reads the files of all.

    Lines that were changed since they were written are skipped; their questions are asked again.

    Args:
        folder: Folder of the files, made with the first answer. If it is None or its parent does
            not exist, answers stay in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        for file in sorted(folder.glob("*.jsonl") if folder else ()):
            with contextlib.suppress(FileError):
                for line in lines_of(file):
                    self._take(line)

    def get(self, key: str) -> str | None:
        """Return the answer, or None."""
        return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        """Keep an answer unless another thread already kept one."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
        if self._folder is None or not self._folder.parent.is_dir():
            return
        self._folder.mkdir(exist_ok=True)
        entry = {"key": key, "answer": answer, "digest": _digest(key, answer)}
        line = json.dumps(entry).encode() + b"\n"
        name = f"rank_{os.environ.get('RANK', '0')}.jsonl"
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line that a killed run left unfinished ends here, not in the middle of this one.
            end = os.lseek(file, 0, os.SEEK_END)
            os.write(file, (b"\n" if end else b"") + line)
        finally:
            os.close(file)

    def _take(self, line: bytes) -> None:
        """Take the answer of a line; skip lines that a killed run left unfinished."""
        entry = parse_object(line)
        key, answer = entry.get("key"), entry.get("answer")
        if not (isinstance(key, str) and isinstance(answer, str)):
            return
        if entry.get("digest") == _digest(key, answer):
            self._answers[key] = answer


def _digest(key: str, answer: str) -> str:
    return hashlib.sha256(f"{key}\n{answer}".encode("utf-8", "surrogatepass")).hexdigest()


def _part(address: str) -> dict[str, object]:
    """Return a medium as part of a message, in OpenAI's format."""
    if address.startswith("data:audio/wav"):
        data = {"data": address.partition(",")[2], "format": "wav"}
        return {"type": "input_audio", "input_audio": data}
    return {"type": "image_url", "image_url": {"url": address}}
