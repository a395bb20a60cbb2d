"""A teacher behind an OpenAI-compatible server: log-probabilities of the tokens of a prompt.

    POST url/completions  {"prompt": [ids], "max_tokens": 1, "prompt_logprobs": k}
    answer                {"choices": [{"prompt_logprobs": [null, {"id": {"logprob": number,
                           "decoded_token": text}, ...}, ...]}]}

Entry t scores token t after its predecessors, in addition to the k likeliest tokens. A missing
entry, number or token is an error, never a 0.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from lightrft.config import TrainConfig
from lightrft.config.options import is_number
from lightrft.config.printable import one_line
from lightrft.experience.teachers import TeacherError, TextScores
from lightrft.tools.rewards.http import (
    ClientRequest,
    HttpClient,
    RequestError,
    RequestLimits,
    json_headers,
    parse_json,
    shown_address,
)
from lightrft.tools.rewards.remote import service_address

KEY_VARIABLE = "LIGHTRFT_TEACHER_KEY"
CONCURRENCY = 16
# Size limits of an answer: one entry, with its text and name; and everything around entries.
BYTES_PER_ENTRY, BYTES_AROUND = 400, 1 << 20
# vLLM's number for a probability of 0.
LEAST_LOGPROB = -9999.0
TOKENS_PER_QUESTION = 200
Entry = Mapping[str, object]


class OpenAIServer:
    """A `LogprobServer` that speaks OpenAI's protocol.

    Args:
        place: Address `http://HOST:PORT/v1`, followed by `#MODEL` if the server has several.
        config: Options `teacher_timeout_seconds`, and bounds of rows.

    Raises:
        ConfigError: The address is invalid.
    """

    def __init__(self, place: str, config: TrainConfig) -> None:
        url, _, self._model = place.partition("#")
        self._url = f"{service_address(url, option='teacher').rstrip('/')}/completions"
        self._shown = shown_address(self._url)
        self._headers = json_headers(os.environ.get(KEY_VARIABLE))
        num_tokens = max(config.max_episode_tokens, config.max_row_tokens, TOKENS_PER_QUESTION + 1)
        num_entries = num_tokens * ((config.teacher_top_k or 0) + 1)
        self._client = HttpClient(
            RequestLimits(
                config.teacher_timeout_seconds,
                max_bytes=BYTES_AROUND + BYTES_PER_ENTRY * num_entries,
                concurrency=CONCURRENCY,
            ),
            uses_environment=True,
        )

    def score(self, texts: Sequence[Sequence[int]], *, top_k: int = 0) -> list[TextScores]:
        """Return the server's log-probabilities of each text."""
        scores = []
        for row, (text, entries) in enumerate(zip(texts, self._ask(texts, top_k), strict=True)):
            try:
                scores.append(read_scores(text, entries, top_k))
            except ValueError as err:
                raise TeacherError(f"teacher {self._shown}, text {row}: {err}") from None
        return scores

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        ids = list(token_ids)
        # The first token of a prompt is not scored, so another token precedes it.
        parts = [
            [ids[start - 1], *ids[start : start + TOKENS_PER_QUESTION]]
            for start in range(0, len(ids), TOKENS_PER_QUESTION)
        ]
        decoded: list[str] = []
        for part, entries in zip(parts, self._ask(parts, 0), strict=True):
            for token_id, entry in zip(part[1:], entries[1:], strict=True):
                details = entry.get(str(token_id))
                text = details.get("decoded_token") if isinstance(details, dict) else None
                if not isinstance(text, str):
                    raise TeacherError(
                        f"teacher {self._shown}: the answer has no decoded_token of token "
                        f"{token_id}: expected a server that says which text it reads"
                    )
                decoded.append(text)
        return decoded

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, texts: Sequence[Sequence[int]], top_k: int) -> list[list[Entry]]:
        """Return the entries of each text.

        Raises:
            TeacherError: An answer is missing or unusable.
        """
        fields: dict[str, object] = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        if self._model:
            fields |= {"model": self._model}
        bodies = [json.dumps({**fields, "prompt": list(text)}).encode() for text in texts]
        requests = [ClientRequest(self._url, body, headers=self._headers) for body in bodies]
        entries = []
        for row, answer in enumerate(self._client.fetch_all(requests) if requests else []):
            if isinstance(answer, RequestError):
                raise TeacherError(
                    f"teacher {answer}; look at the server's log, or raise teacher_timeout_seconds"
                )
            try:
                entries.append(read_entries(answer, len(texts[row])))
            except ValueError as err:
                raise TeacherError(f"teacher {self._shown}, text {row}: {err}") from None
        return entries


def read_entries(answer: bytes, num_tokens: int) -> list[Entry]:
    """Return the entry of each token of a prompt; {} for the first.

    Raises:
        ValueError: The answer has no such entries; the message is one line.
    """
    parsed = parse_json(answer)
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    entries = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(entries, list):
        said = one_line(answer[:200].decode(errors="replace"))
        raise ValueError(
            f"the answer has no prompt_logprobs: expected a server that gives them (vLLM does), "
            f"got {said!r}"
        )
    if len(entries) != num_tokens or not all(isinstance(each, dict) for each in entries[1:]):
        raise ValueError(
            f"the answer has {len(entries)} prompt_logprobs, some of them empty, for {num_tokens} "
            "tokens: expected one of each token but the first"
        )
    return [{}, *entries[1:]]


def read_scores(text: Sequence[int], entries: Sequence[Entry], top_k: int) -> TextScores:
    """Return the log-probabilities of a text.

    Raises:
        ValueError: A number is missing or invalid; the message is one line.
    """
    logprobs = np.zeros(len(text), dtype=np.float32)
    top_ids = np.zeros((len(text), top_k), dtype=np.int32)
    top_logprobs = np.zeros((len(text), top_k), dtype=np.float32)
    for place in range(1, len(text)):
        numbers = {read_id(name): read_logprob(entry) for name, entry in entries[place].items()}
        if text[place] not in numbers:
            raise ValueError(f"token {place} is {text[place]}, and the answer does not score it")
        logprobs[place] = numbers[text[place]]
        if not top_k:
            continue
        likeliest = sorted(numbers, key=lambda token: (-numbers[token], token))[:top_k]
        if len(likeliest) < top_k:
            raise ValueError(
                f"token {place} has {len(likeliest)} alternatives, expected teacher_top_k = {top_k}"
            )
        top_ids[place] = likeliest
        top_logprobs[place] = [numbers[token] for token in likeliest]
    return TextScores(logprobs, top_ids, top_logprobs)


def read_id(name: str) -> int:
    """Parse a token id; raise ValueError if it is none."""
    if not name.isdecimal() or not name.isascii() or len(name) > 9:
        raise ValueError(f"{one_line(name)[:40]!r} is no token id")
    return int(name)


def read_logprob(entry: object) -> float:
    """Return the log-probability of an entry.

    Raises:
        ValueError: It is no log-probability, or belongs to an impossible token.
    """
    logprob = entry.get("logprob") if isinstance(entry, dict) else None
    if not is_number(logprob):
        raise ValueError(f"logprob is {one_line(repr(logprob))[:40]}, expected a number")
    # A server's rounding may lift a certain token slightly above 0.
    if not math.isfinite(logprob) or logprob > 1e-3 or logprob <= LEAST_LOGPROB:
        raise ValueError(
            f"logprob is {logprob:g}, expected a finite log-probability; a token of probability 0 "
            "teaches no finite number"
        )
    return min(float(logprob), 0.0)
