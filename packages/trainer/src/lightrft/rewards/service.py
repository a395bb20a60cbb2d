"""A reward function as an HTTP service, in the protocol of `lightrft.rewards.remote`."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from lightrft.rewards.types import RewardError, RewardFunction

MAX_BODY_BYTES = 1 << 30
_OWN = ("queries", "prompts", "responses", "labels", "references")


class RewardServer(ThreadingHTTPServer):
    """Answers requests with the rewards of one function, one request at a time.

    Args:
        reward: The function.
        host, port: Where to listen; port 0 takes a free one (`server_port`).
    """

    daemon_threads = True

    def __init__(self, reward: RewardFunction, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.reward = reward
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Scores the responses of one request."""
        server = cast("RewardServer", self.server)
        try:
            request = self._read()
            with server.lock:
                status, answer = 200, _score(server.reward, request)
        except RewardError as err:
            # Not a status that a client repeats: the same request would fail again.
            status, answer = 422, {"error": str(err)}
        except ValueError as err:
            status, answer = 400, {"error": str(err)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: they hold prompts and responses."""

    def _read(self) -> dict[str, object]:
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 < size <= MAX_BODY_BYTES:
            raise ValueError(f"expected a body of 1 to {MAX_BODY_BYTES} bytes, got {size}")
        request = json.loads(self.rfile.read(size))
        if not isinstance(request, dict):
            raise ValueError("expected a JSON object")
        return request


def _score(reward: RewardFunction, request: Mapping[str, object]) -> dict[str, object]:
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
    results = reward.score(prompts, responses, texts, columns)
    names = sorted({name for result in results for name in result.components})
    complete = [n for n in names if all(n in result.components for result in results)]
    return {
        "rewards": [result.reward for result in results],
        "components": {n: [result.components[n] for result in results] for n in complete},
    }


def _strings(name: str, found: object) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"expected a list of texts under {name!r}")
    return found
