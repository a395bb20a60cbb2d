"""A reward function as an HTTP service, in the protocol of `lightrft.tools.rewards.remote`.

One thread holds all connections; another scores one request at a time. Slow, large and
unauthorised clients are refused before they cost anything.
"""

import asyncio
import hmac
import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from lightrft.config.printable import one_line
from lightrft.rewards.types import Columns, Labels, RewardError, RewardFunction, Texts
from lightrft.rollout.agents.http_server import (
    LOOPBACK,
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    HttpServer,
)
from lightrft.tools.rewards.http import parse_json

logger = logging.getLogger(__name__)

_OWN = ("queries", "prompts", "responses", "labels", "references")
# Rewards have a deadline of their own.
LIMITS = HttpLimits(
    max_header_bytes=32 << 10,
    max_body_bytes=64 << 20,
    max_held_bytes=512 << 20,
    max_connections=1024,
    max_waiting=64,
    read_seconds=30.0,
    write_seconds=30.0,
    idle_seconds=30.0,
    call_seconds=math.inf,
)


class RewardServer:
    """Server of the rewards of one function; a context manager that ends it.

    Args:
        reward: Reward function.
        host, port: Address to listen at; port 0 takes a free one.
        token: Token that requests need as `Authorization: Bearer TOKEN`; None accepts all but those
            of sites in a browser.
        limits: Limits for clients.
    """

    def __init__(
        self,
        reward: RewardFunction,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
        limits: HttpLimits = LIMITS,
    ) -> None:
        self._reward, self._token = reward, token
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self.http = HttpServer(self._answer, limits, host=host, port=port, check=self._check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; may be called twice."""
        self.http.close()
        self._scorer.shutdown(wait=False, cancel_futures=True)

    def _check(self, head: HttpRequest) -> None:
        """Refuse strangers, and without a token whatever a site in a browser may send."""
        head.require("POST")
        if self._token is None:
            if "origin" in head.headers:
                raise HttpError(403, "sites in a browser need a token")
            head.require_json()
            return
        authorization = head.headers.get("authorization", "").encode()
        if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
            raise HttpError(401, "wrong or no token")

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._scorer, _score, self._reward, request.body)
        except RewardError as err:
            # A status after which clients do not retry: the same request would fail again.
            raise HttpError(422, str(err)) from err
        except RecursionError:
            raise HttpError(400, "nested too deeply") from None
        except ValueError as err:
            raise HttpError(400, one_line(str(err))) from err
        except Exception:
            logger.exception("reward %r failed", self._reward.name)
            raise
        return HttpResponse(200, json.dumps(answer).encode())


def _score(reward: RewardFunction, body: bytes) -> dict[str, object]:
    results = reward.score(*_arguments(body))
    decided = [result for result in results if result is not None]
    names = sorted({name for result in decided for name in result.components})
    answer: dict[str, object] = {
        "rewards": [None if result is None else result.reward for result in results],
        "components": {
            name: [None if result is None else result.components[name] for result in results]
            for name in names
            if all(name in result.components for result in decided)
        },
    }
    if len(decided) < len(results):
        answer["undecided"] = f"reward {reward.name!r} could not decide them within its limits"
    return answer


def _arguments(body: bytes) -> tuple[Texts, Texts, Labels, Columns]:
    """Return a request's prompts, responses, labels and columns, or raise a ValueError."""
    request = parse_json(body)
    if not isinstance(request, dict):
        raise ValueError("expected a JSON object")
    responses = _strings("responses", request.get("responses"))
    count = len(responses)
    prompts = _strings("prompts", request.get("prompts", [""] * count))
    labels = request.get("labels", request.get("references", [None] * count))
    columns = {
        name: values
        for name, values in request.items()
        if name not in _OWN and isinstance(values, list) and len(values) == count
    }
    if not isinstance(labels, list) or not len(labels) == len(prompts) == count:
        raise ValueError(f"expected {count} prompts and labels, one per response")
    texts = [None if label is None else str(label) for label in labels]
    return prompts, responses, texts, columns


def _strings(name: str, values: object) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ValueError(f"expected a list of texts under {name!r}")
    return values
