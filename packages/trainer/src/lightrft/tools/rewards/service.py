"""A reward function as an HTTP service, in the protocol of `lightrft.tools.rewards.remote`.

One thread holds all connections (asyncio); another scores one request at a time. A connection
carries one request. Slow, large and unauthorised clients are refused before they cost anything.
"""

import asyncio
import hmac
import io
import json
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import Self

from lightrft.config.printable import one_line
from lightrft.rewards.types import Columns, Labels, RewardError, RewardFunction, Texts
from lightrft.tools.rewards.http import parse_json

_OWN = ("queries", "prompts", "responses", "labels", "references")
_MAX_HEAD_BYTES, _CHUNK_BYTES = 32 << 10, 64 << 10
_DISCARD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of time, memory and connections for clients.

    Args:
        read_seconds: Time from the connection to the end of the request.
        write_seconds: Time for the client to take the answer.
        max_body_bytes: Size of the longest request.
        max_held_bytes: Size of all requests that were read and not answered yet.
        max_connections: Number of connections at once; further ones are asked to retry.
        max_waiting: Number of requests that are scored or wait for it.
    """

    read_seconds: float = 30.0
    write_seconds: float = 30.0
    max_body_bytes: int = 64 << 20
    max_held_bytes: int = 512 << 20
    max_connections: int = 1024
    max_waiting: int = 64


class _RefusedError(Exception):
    """A request that is refused with a status and a sentence."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardServer:
    """Server of the rewards of one function, one request at a time.

    It listens as soon as it is constructed; use it as a context manager, or close it.

    Args:
        reward: Reward function.
        host, port: Address to listen at; port 0 takes a free one (`server_port`).
        token: Token that requests need as `Authorization: Bearer TOKEN`; None accepts all but those
            of sites in a browser.
        limits: Limits for clients.
    """

    def __init__(
        self,
        reward: RewardFunction,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: ServiceLimits | None = None,
    ) -> None:
        self._reward = reward
        self._token = token
        self._limits = limits or ServiceLimits()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=512)
        self.server_port: int = self._socket.getsockname()[1]
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ended = threading.Event()
        self.num_connections = 0
        self.num_waiting = 0
        self._held_bytes = 0

    def serve_forever(self) -> None:
        """Serve until `shutdown`, or an exception such as KeyboardInterrupt."""
        self._ended.clear()
        try:
            asyncio.run(self._serve())
        finally:
            self._ended.set()

    def shutdown(self) -> None:
        """End `serve_forever` of another thread, and wait for its end."""
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._ended.wait(_DISCARD_SECONDS + self._limits.write_seconds)

    def server_close(self) -> None:
        """Stop listening; may be called twice."""
        self._socket.close()
        self._scorer.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.server_close()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=_MAX_HEAD_BYTES
        )
        try:
            await self._stopping.wait()
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        body = bytearray()
        try:
            status, answer = await self._answer(reader, writer, body)
            async with asyncio.timeout(self._limits.write_seconds):
                writer.write(_response(status, answer))
                await writer.drain()
                if status != HTTPStatus.OK:
                    await _discard(reader, writer)
        except (OSError, asyncio.IncompleteReadError):  # the client left or reads nothing
            writer.transport.abort()
        finally:
            self._held_bytes -= len(body)
            self.num_connections -= 1
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytearray
    ) -> tuple[HTTPStatus, Mapping[str, object]]:
        try:
            try:
                async with asyncio.timeout(self._limits.read_seconds):
                    await self._read(reader, writer, body)
            except TimeoutError:
                raise _RefusedError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the request took longer than {self._limits.read_seconds:g} s",
                ) from None
            return HTTPStatus.OK, await self._score(body)
        except _RefusedError as err:
            return err.status, {"error": str(err)}
        except RewardError as err:
            # A status after which clients do not retry: the same request would fail again.
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(err)}

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytearray
    ) -> None:
        """Fill the body of an acceptable request; refuse any other."""
        if self.num_connections > self._limits.max_connections:
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        method, headers = await _read_head(reader)
        if self._token is not None:
            authorization = headers.get("authorization", "").encode()
            if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
                raise _RefusedError(HTTPStatus.UNAUTHORIZED, "wrong or no token")
        if method != "POST":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "expected POST")
        if self._token is None:
            _refuse_sites(headers)
        size = self._body_size(headers)
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(body) < size:
            chunk = await reader.read(min(size - len(body), _CHUNK_BYTES))
            if not chunk:
                raise asyncio.IncompleteReadError(b"", size)
            body += chunk
            self._held_bytes += len(chunk)
            if self._held_bytes > self._limits.max_held_bytes:
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are held")

    def _body_size(self, headers: Message) -> int:
        lengths = headers.get_all("content-length", [])
        if not lengths:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "expected Content-Length")
        text, limit = lengths[0], self._limits.max_body_bytes
        if len(lengths) > 1 or not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "expected one number in Content-Length")
        if not 0 < int(text) <= limit:
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"expected a body of 1 to {limit} bytes, got {int(text)}",
            )
        return int(text)

    async def _score(self, body: bytearray) -> Mapping[str, object]:
        if self.num_waiting >= self._limits.max_waiting:
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests are waiting")
        self.num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._scorer, _score, self._reward, bytes(body))
        except RecursionError:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "nested too deeply") from None
        except ValueError as err:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, one_line(str(err))) from err
        finally:
            self.num_waiting -= 1


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, Message]:
    """Return the method and the headers."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {_MAX_HEAD_BYTES} bytes"
        ) from None
    first, _, rest = head.partition(b"\r\n")
    words = first.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "expected METHOD PATH HTTP/1.1")
    try:
        return words[0], parse_headers(io.BytesIO(rest))
    except HTTPException:
        raise _RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers") from None


def _refuse_sites(headers: Message) -> None:
    """Refuse requests that a site in a browser of this machine may send without permission."""
    if "origin" in headers:
        raise _RefusedError(HTTPStatus.FORBIDDEN, "sites in a browser need a token")
    if headers.get_content_type() != "application/json" or "content-type" not in headers:
        raise _RefusedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json"
        )


async def _discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what a refused client still sends for a moment; else the refusal would be lost."""
    if writer.can_write_eof():
        writer.write_eof()
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while await reader.read(_CHUNK_BYTES):
                pass
    except TimeoutError:
        pass


def _response(status: HTTPStatus, answer: Mapping[str, object]) -> bytes:
    body = json.dumps(answer).encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.REQUEST_TIMEOUT):
        lines.append("Retry-After: 1")
    if status == HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _score(reward: RewardFunction, body: bytes) -> dict[str, object]:
    results = reward.score(*_arguments(body))
    decided = [result for result in results if result is not None]
    names = sorted({name for result in decided for name in result.components})
    complete = [n for n in names if all(n in result.components for result in decided)]
    answer: dict[str, object] = {
        "rewards": [None if result is None else result.reward for result in results],
        "components": {
            name: [None if result is None else result.components[name] for result in results]
            for name in complete
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
