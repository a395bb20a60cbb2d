"""Rewards from a service: one JSON request over HTTP per call.

    POST url  {"queries": [...], "prompts": [...], "responses": [...], "labels": [...],
               "references": [...], columns...}
    answer    {"rewards": [number, ...], "components": {name: [number, ...]}}

`queries` are prompts followed by their responses; `references` repeats the labels for services
that know them under this name; `components` may be left out.
"""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from lightrft.rewards.types import Columns, Labels, RewardError, RewardResult, Texts
from lightrft.strategy.config import ConfigError, mask_address

MAX_WAIT_SECONDS = 10.0
# Statuses of a service that is starting, restarting or overloaded.
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class _TemporaryError(Exception):
    """The request may succeed if it is sent again."""


class RemoteReward:
    """Asks a reward service; a request that cannot be answered yet is repeated until the deadline.

    The service is reached directly, never through a proxy of the environment.

    Args:
        url: Address, http or https.
        name: Name of the reward and of its component.
        timeout_seconds: Deadline of one call, repetitions included.

    Raises:
        ConfigError: The address is none.
    """

    needs_labels = False

    def __init__(self, url: str, *, name: str = "remote", timeout_seconds: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"remote_rm_url: got {mask_address(url)!r}, expected http://HOST:PORT/PATH; a "
                "Python file is given by --reward_fn FILE.py:FUNCTION"
            )
        self.name = name
        self._url = url
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._seconds = timeout_seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult]:
        """See `RewardFunction.score`."""
        if not responses:
            return []
        request = {
            **{name: list(values) for name, values in columns.items()},
            "queries": [p + r for p, r in zip(prompts, responses, strict=True)],
            "prompts": list(prompts),
            "responses": list(responses),
            "labels": list(labels),
            "references": list(labels),
        }
        return self._results(self._ask(request), len(responses))

    def close(self) -> None:
        """Has nothing to end."""

    def _ask(self, request: Mapping[str, object]) -> object:
        try:
            body = json.dumps(request, ensure_ascii=False).encode()
        except (TypeError, ValueError) as err:
            raise RewardError(f"reward service {self._shown}: a column is no JSON: {err}") from err
        deadline = time.monotonic() + self._seconds
        wait_seconds, num_attempts = 0.25, 0
        while True:
            num_attempts += 1
            try:
                return self._ask_once(body, max(deadline - time.monotonic(), 0.001))
            except _TemporaryError as err:
                if time.monotonic() + wait_seconds >= deadline:
                    raise RewardError(
                        f"reward service {self._shown} gave no answer within {self._seconds:g} s "
                        f"and {num_attempts} attempts: {err}; start it, or raise the reward timeout"
                    ) from err
            time.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, MAX_WAIT_SECONDS)

    def _ask_once(self, body: bytes, seconds: float) -> object:
        request = urllib.request.Request(
            self._url, data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                text = answer.read()
        except urllib.error.HTTPError as err:
            said = err.read(500).decode(errors="replace").strip()
            message = f"status {err.code}, {said!r}"
            if err.code in _TEMPORARY:
                raise _TemporaryError(message) from err
            raise RewardError(f"reward service {self._shown} refused: {message}") from err
        except OSError as err:  # URLError, time-outs and lost connections
            raise _TemporaryError(str(err)) from err
        try:
            return json.loads(text)
        except ValueError as err:
            raise RewardError(
                f"reward service {self._shown} answered no JSON: {text[:200]!r}"
            ) from err

    def _results(self, answer: object, count: int) -> list[RewardResult]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        components = answer.get("components", {}) if isinstance(answer, dict) else {}
        if not isinstance(components, dict):
            raise RewardError(f"reward service {self._shown}: components must be an object")
        values = self._numbers("rewards", rewards, count)
        columns = {
            str(name): self._numbers(str(name), found, count) for name, found in components.items()
        }
        return [
            RewardResult(value, {self.name: value, **{n: c[i] for n, c in columns.items()}})
            for i, value in enumerate(values)
        ]

    def _numbers(self, name: str, found: object, count: int) -> list[float]:
        is_right = (
            isinstance(found, list)
            and len(found) == count
            and all(isinstance(x, int | float) and not isinstance(x, bool) for x in found)
            and all(math.isfinite(x) for x in found)
        )
        if not is_right or not isinstance(found, list):
            raise RewardError(
                f"reward service {self._shown} must answer {count} finite numbers under {name!r}: "
                f"got {str(found)[:200]}"
            )
        return [float(x) for x in found]
