"""Rewards from a service: one JSON request over HTTP per call.

    POST url  {"queries": [...], "prompts": [...], "responses": [...], "labels": [...],
               "references": [...], columns...}
    answer    {"rewards": [number, ...], "components": {name: [number, ...]},
               "undecided": "reason"}

`queries` are prompts followed by their responses; `references` repeats the labels for services
that use this name; `components` is optional. If `undecided` holds a reason, rewards may be null:
those could not be decided, and their components are ignored.
"""

import json
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from lightrft.config import ConfigError, ScorerOptions
from lightrft.config.options import MASK, comma_hint, is_number, mask_address
from lightrft.config.printable import one_line
from lightrft.engines.media.media import Media
from lightrft.rewards.build import numbered, reward_urls
from lightrft.rewards.types import (
    ENVIRONMENTS,
    Columns,
    Labels,
    RewardError,
    RewardResult,
    Texts,
)
from lightrft.tools.rewards.http import (
    ClientRequest,
    HttpClient,
    RequestError,
    RequestLimits,
    finite_numbers,
    json_headers,
    parse_json,
    shown_address,
)

TOKEN_VARIABLE = "LIGHTRFT_REWARD_TOKEN"
MAX_COMPONENTS, MAX_NAME_CHARACTERS = 100, 100
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class RemoteReward:
    """Client of a reward service; repeats temporary failures until the deadline.

    The service is reached directly, never through a proxy of the environment.

    Args:
        url: Address, http or https; `${NAME}` in it stands for an environment variable.
        name: Name of the reward and of its component.
        timeout_seconds: Deadline of one call, repetitions included.
        parallel_calls: Number of requests at once.
        token: Token sent as `Authorization: Bearer TOKEN`; None takes `LIGHTRFT_REWARD_TOKEN` of
            the environment, if that is set.

    Raises:
        ConfigError: The address is not valid, or names a variable that is not set.
    """

    needs_labels = False
    whole_batch = False

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        timeout_seconds: float = 120.0,
        parallel_calls: int = 1,
        token: str | None = None,
    ) -> None:
        self.name = name
        self.parallel_calls = parallel_calls
        self._url = service_address(url)
        self._shown = shown_address(self._url)
        self._headers = json_headers(token or os.environ.get(TOKEN_VARIABLE))
        self._client = HttpClient(RequestLimits(timeout_seconds, concurrency=parallel_calls))

    def score(
        self, prompts: Texts, responses: Texts, labels: Labels, columns: Columns
    ) -> list[RewardResult | None]:
        """Return the service's reward of each response."""
        if not responses:
            return []
        request = {
            **{
                name: [e.data_addresses() if isinstance(e, Media) else e for e in values]
                for name, values in columns.items()
                if name != ENVIRONMENTS
            },
            "queries": [p + r for p, r in zip(prompts, responses, strict=True)],
            "prompts": list(prompts),
            "responses": list(responses),
            "labels": list(labels),
            "references": list(labels),
        }
        return self._results(self._ask(request), len(responses))

    def close(self) -> None:
        """Close the connections; may be called twice."""
        self._client.close()

    def _ask(self, request: Mapping[str, object]) -> object:
        try:
            body = json.dumps(request, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as err:
            raise RewardError(
                f"reward service {self._shown}: a column is no JSON: {one_line(str(err))}"
            ) from err
        try:
            answer = self._client.fetch(ClientRequest(self._url, body, headers=self._headers))
        except RequestError as err:
            hint = "; start it, or raise --reward_timeout_seconds" if err.is_temporary else ""
            raise RewardError(f"reward service {err}{hint}") from err
        try:
            return parse_json(answer)
        except ValueError as err:
            said = one_line(answer[:800].decode(errors="replace"))
            raise RewardError(
                f"reward service {self._shown} answered no JSON ({err}): {said!r}"
            ) from err

    def _results(self, answer: object, count: int) -> list[RewardResult | None]:
        if not isinstance(answer, dict):
            raise RewardError(
                f"reward service {self._shown} must answer {count} finite numbers under 'rewards' "
                f"of an object: got {type(answer).__name__}"
            )
        components = answer.get("components", {})
        if not isinstance(components, dict) or len(components) > MAX_COMPONENTS:
            raise RewardError(
                f"reward service {self._shown}: components must be an object of at most "
                f"{MAX_COMPONENTS} lists"
            )
        rewards, reason = answer.get("rewards"), answer.get("undecided")
        gaps = set[int]()
        # Without a reason, a null is an error of the service.
        if isinstance(rewards, list) and isinstance(reason, str) and reason.strip():
            gaps = {i for i, value in enumerate(rewards) if value is None}

        def numbers(name: str, values: object) -> list[float]:
            if gaps and isinstance(values, list):
                values = [0.0 if i in gaps else value for i, value in enumerate(values)]
            return self._numbers(name, values, count)

        values = numbers("rewards", rewards)
        columns = {name: numbers(name, values) for name, values in components.items()}
        return [
            None
            if i in gaps
            else RewardResult(value, {self.name: value, **{n: c[i] for n, c in columns.items()}})
            for i, value in enumerate(values)
        ]

    def _numbers(self, name: str, values: object, count: int) -> list[float]:
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise RewardError(
                f"reward service {self._shown}: the name of a component must have 1 to "
                f"{MAX_NAME_CHARACTERS} printable characters: got {one_line(name)!r}"
            )
        numbers = finite_numbers(values, count)
        if numbers is None:
            raise RewardError(
                f"reward service {self._shown} must answer {count} finite numbers under {name!r}: "
                f"got {_described(values)}"
            )
        return numbers


def reward_service(config: ScorerOptions, url: str) -> RemoteReward:
    """Return one of the reward services of a run.

    Raises:
        ConfigError: The address is not valid, or names a variable that is not set.
    """
    urls = reward_urls(config)
    return RemoteReward(
        url,
        name=numbered("remote", urls.index(url), len(urls)),
        timeout_seconds=config.reward_timeout_seconds,
        parallel_calls=config.reward_workers,
        token=config.remote_rm_token,
    )


def service_address(url: str, *, option: str = "remote_rm_url") -> str:
    """Return the address with its environment variables replaced.

    Args:
        url: Address from the options.
        option: Name of the option, for messages.

    Raises:
        ConfigError: The address is not valid, is masked (`***`), or names a variable that is not
            set.
    """
    shown = mask_address(url)
    missing = [name for name in _VARIABLE.findall(url) if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{option}: {shown!r} names the environment variable {missing[0]}, which is not set"
        )
    if MASK in url:
        raise ConfigError(
            f"{option}: {shown!r} is an address whose secrets were left out when it was "
            "saved: give it again, best with ${NAME} of an environment variable in their place"
        )
    full = _VARIABLE.sub(lambda match: os.environ[match[1]], url)
    try:
        parts = urlsplit(full)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_right = is_right and full.isprintable() and not re.search(r" |^[^?]*,https?://", full)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{option}: got {shown!r}, expected http://HOST:PORT/PATH; a Python "
            f"file is given by --reward_fn FILE.py:FUNCTION{comma_hint(full)}"
        )
    return full


def _described(values: object) -> str:
    """Return a description of a wrong value, short for nested and huge ones."""
    if not isinstance(values, list):
        is_short = values is None or isinstance(values, str | float | bool)
        return one_line(repr(values)) if is_short else type(values).__name__
    wrong = [x for x in values if not is_number(x)]
    first = f", the first {type(wrong[0]).__name__}" if wrong else ""
    return f"a list of {len(values)} with {len(wrong)} that are no numbers{first}"
