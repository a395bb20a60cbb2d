"""A small HTTP/1.1 server in a separate thread: of agents' calls, and of served rewards."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import h11

LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16
# Bytes to read and discard of a request that is refused before it has arrived in full.
_MAX_PASSED_OVER = 1 << 26
# Connections beyond the limit that may send the rest of their requests; others are just closed.
_MAX_TURNED_AWAY = 64
# Pause between checks whether a client that closed one side is still connected.
_ASK_SECONDS, _MAX_ASK_SECONDS = 0.02, 5.0
_JSON = "application/json"
# Headers that must not repeat, because other programs may read another copy.
_ONCE = ("host", "authorization", "x-api-key", "content-type")
# Statuses after which the same request may succeed.
_TEMPORARY = (408, 429, 504)
# Answer to a connection beyond the limit, whatever it asks.
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n"
    b"retry-after: 1\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of connections and requests.

    Args:
        max_header_bytes: Size of the request line and all headers.
        max_body_bytes: Size of one body.
        max_held_bytes: Size of the bodies of all unanswered requests.
        max_connections: Number of open connections; further ones are told to come again.
        max_waiting: Number of requests that wait for their answers.
        read_seconds: Time for a request to arrive in full.
        write_seconds: Time for a client to read what it was sent.
        idle_seconds: Time between two requests of a connection.
        call_seconds: Time that a request waits for its answer.
    """

    max_header_bytes: int = 1 << 14
    max_body_bytes: int = 1 << 24
    max_held_bytes: int = 1 << 28
    max_connections: int = 4096
    max_waiting: int = 4096
    read_seconds: float = 20.0
    write_seconds: float = 60.0
    idle_seconds: float = 300.0
    call_seconds: float = 600.0


# Larger limits, for calls that repeat the images of their histories.
MEDIA_LIMITS = HttpLimits(max_body_bytes=1 << 26, max_held_bytes=1 << 31)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that has arrived in full.

    Args:
        method: Method in capitals.
        path: Path without the query.
        headers: Headers by lower-case name.
        body: Bytes of the body; empty while they are still to come.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    def require(self, method: str) -> None:
        """Raise an HttpError if the request has another method."""
        if self.method != method:
            text = f"{self.path} takes {method} only"
            raise HttpError(405, text, code="method_not_allowed")

    def require_json(self) -> None:
        """Raise an HttpError if the body is not marked as JSON."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:
            raise HttpError(415, "the content-type must be application/json")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer to a request.

    Args:
        status: Status code.
        body: Bytes of the body.
        content_type: Content type of the body.
        headers: Further headers.
        on_sent: Callback, with True before sending and with False if sending failed.
    """

    status: int
    body: bytes
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()
    on_sent: Callable[[bool], None] | None = None


class HttpError(Exception):
    """Refusal of a request; the message is for the client.

    Args:
        status: Status code of the answer.
        message: Message of one line.
        code: Short name of the fault.
    """

    def __init__(self, status: int, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


Handle = Callable[[HttpRequest], Awaitable[HttpResponse]]


def error_response(error: HttpError) -> HttpResponse:
    """Return the answer to a refused request, in OpenAI's and Anthropic's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": str(error), "type": kind, "param": None, "code": error.code}
    # OpenAI's clients retry after a 409, but here a retry only helps if the server is full or slow.
    headers = [("x-should-retry", "false")]
    if error.status in _TEMPORARY:
        headers = [("x-should-retry", "true"), ("retry-after", "1")]
    if error.status == 401:
        headers.append(("www-authenticate", "Bearer"))
    # The outer type is Anthropic's.
    body = json.dumps({"type": "error", "error": fields}).encode()
    return HttpResponse(error.status, body, headers=tuple(headers))


class HttpServer:
    """Server in a thread that runs until `close`.

    Data of clients is never logged. A connection that does not speak HTTP/1.1 gets an error if
    possible and is closed. A client that disconnects cancels the answer to its request.

    Args:
        handle: Function that answers a request; an `HttpError` is sent, other errors become a 500.
        limits: Limits of requests.
        host, port: Address to listen at; port 0 takes a free one.
        check: Function that gets the head of a request before its body is read, and raises an
            `HttpError` to refuse it.

    Attributes:
        body_bytes: Size of the bodies of all unanswered requests.
        num_waiting: Number of requests that wait for their answers.

    Raises:
        OSError: This machine cannot listen at the address.
    """

    def __init__(
        self,
        handle: Handle,
        limits: HttpLimits | None = None,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        check: Callable[[HttpRequest], object] = lambda head: None,
    ) -> None:
        self.handle, self.limits, self.check = handle, limits or HttpLimits(), check
        self.body_bytes = self.num_waiting = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._turned_away: set[asyncio.Task[None]] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address of a server on the loopback interface, as clients write it."""
        return f"http://{LOOPBACK}:{self.port}"

    def close(self) -> None:
        """End all connections and the thread; calling it twice is allowed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, backlog=1024)
        await self._stop.wait()
        server.close()
        tasks = self._connections | self._turned_away
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, tasks = asyncio.current_task(), self._connections
        is_full = len(tasks) >= self.limits.max_connections
        if is_full:
            tasks = self._turned_away
            writer.write(_FULL)
        if task is None or (len(self._turned_away) >= _MAX_TURNED_AWAY and is_full):
            writer.close()
            return
        tasks.add(task)
        try:
            if is_full:
                await _pass_over(reader, writer, self.limits.read_seconds)
            else:
                await _Connection(self, reader, writer).serve()
            writer.close()
            async with asyncio.timeout(self.limits.write_seconds):
                await writer.wait_closed()
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            pass  # the client is gone, too slow, or the server ends
        finally:
            tasks.discard(task)
            # Without an abort, the connection would stay until the client has read everything.
            writer.transport.abort()


class _Connection:
    """A connection, whose requests are answered one after another.

    Args:
        server: Server, which has the limits and counts the bytes of all bodies.
        reader, writer: Streams from and to the client.
    """

    def __init__(
        self, server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.server, self.limits = server, server.limits
        self.reader, self.writer, self.body_bytes = reader, writer, 0
        size = self.limits.max_header_bytes
        self.wire = h11.Connection(h11.SERVER, max_incomplete_event_size=size)

    async def serve(self) -> None:
        """Answer requests until either side closes the connection."""
        try:
            await self._serve()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.server.body_bytes -= self.body_bytes
        self.body_bytes = 0

    async def _serve(self) -> None:
        while True:
            try:
                request = await self._next_request()
            except HttpError as error:
                await self._refuse(error)
                return
            if request is None:
                return
            await self._answer(request)
            self._let_go()
            if self.wire.our_state is not h11.DONE:
                return
            self.wire.start_next_cycle()

    async def _next_request(self) -> HttpRequest | None:
        """Return the next request of the connection; None if the client has closed it."""
        async with asyncio.timeout(self.limits.idle_seconds):
            if not await self._first_bytes():
                return None
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                return await self._request()
        except TimeoutError:
            text = f"the request took longer than {self.limits.read_seconds:g} s"
            raise HttpError(408, text, code="timeout") from None
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise _long_headers(self.limits) from None
            text = "the request is no sound HTTP/1.1"
            raise HttpError(error.error_status_hint, text) from None

    async def _first_bytes(self) -> bool:
        """Return whether a further request begins."""
        if self.wire.trailing_data[0]:
            return True
        data = await self.reader.read(_CHUNK)
        # h11 does not measure complete headers, as it first looks for a host in them.
        if data.find(b"\r\n\r\n") > self.limits.max_header_bytes:
            raise _long_headers(self.limits)
        self.wire.receive_data(data)
        return bool(data)

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self.wire.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            if self.wire.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self.wire.receive_data(await self.reader.read(_CHUNK))

    async def _request(self) -> HttpRequest | None:
        head = await self._next()
        if not isinstance(head, h11.Request):
            return None
        size = sum(len(name) + len(value) for name, value in head.headers)
        if size + len(head.target) > self.limits.max_header_bytes:
            raise _long_headers(self.limits)
        headers: dict[str, str] = {}
        for name, value in head.headers:
            text = name.decode("ascii")
            if text in headers and text in _ONCE:
                raise HttpError(400, f"the header {text} was sent twice")
            headers[text] = value.decode("latin-1")
        method, path = head.method.decode("ascii").upper(), self._checked_path(head, headers)
        request, body = HttpRequest(method, path, headers), bytearray()
        self.server.check(request)
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return None
            body += event.data
            self.body_bytes += len(event.data)
            self.server.body_bytes += len(event.data)
            if self.server.body_bytes > self.limits.max_held_bytes:
                text = "too many large requests wait: ask again later"
                raise HttpError(429, text, code="rate_limit_exceeded")
            if len(body) > self.limits.max_body_bytes:
                raise _too_large(self.limits)
        return replace(request, body=bytes(body))

    def _checked_path(self, head: h11.Request, headers: dict[str, str]) -> str:
        """Return the path, or refuse an invalid request before its body is read."""
        if "content-length" in headers and "transfer-encoding" in headers:
            raise HttpError(400, "a body has either a length or chunks")
        if headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "compressed bodies are refused")
        if int(headers.get("content-length") or 0) > self.limits.max_body_bytes:
            raise _too_large(self.limits)
        path = head.target.decode("ascii", "replace").partition("?")[0]
        if not path.startswith("/") or "%" in path or ".." in path or "\\" in path:
            raise HttpError(404, "no such path", code="not_found")
        return path

    async def _answer(self, request: HttpRequest) -> None:
        """Answer a request; end with a CancelledError if the client disconnects before."""
        response = await self._response(request)
        # Before sending: a client may act on an answer before the server knows that it arrived.
        note = response.on_sent or (lambda is_sent: None)
        note(True)
        try:
            await self._send(response)
        except BaseException:
            note(False)
            raise

    async def _response(self, request: HttpRequest) -> HttpResponse:
        server, seconds = self.server, self.limits.call_seconds
        if server.num_waiting >= self.limits.max_waiting:
            text = "too many calls wait: ask again later"
            return error_response(HttpError(429, text, code="rate_limit_exceeded"))
        server.num_waiting += 1
        watch = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            async with asyncio.timeout(seconds) as limit:
                return await server.handle(request)
        except HttpError as refusal:
            error = refusal
        except Exception:  # noqa: BLE001 - its text may hold data of the client
            error = HttpError(500, "the server failed", code="internal")
            if limit.expired():
                error = HttpError(504, f"no answer within {seconds:g} s", code="timeout")
        finally:
            server.num_waiting -= 1
            # The watcher must end before the bytes of a further request are read.
            watch.cancel()
            await asyncio.wait({watch})
        return error_response(error)

    async def _watch(self, answering: asyncio.Task[object] | None) -> None:
        """Cancel the task that answers if the client disconnects while it waits.

        A client that closed its sending side may still want the answer. Only writes reveal
        whether it is connected: the second write shows that the first one failed. Clients ignore
        these interim responses.
        """
        try:
            data = await self.reader.read(_CHUNK)
            self.wire.receive_data(data)
            pause = _ASK_SECONDS
            while not data and not self.writer.is_closing():
                if self.wire.their_http_version != b"1.1":
                    return  # HTTP/1.0 has no interim responses, so nothing tells
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_ASK_SECONDS)
        except OSError:
            data = b""
        if not data and answering is not None:
            answering.cancel()

    async def _send(self, response: HttpResponse) -> None:
        size = str(len(response.body))
        fixed = ("content-type", response.content_type), ("content-length", size)
        headers = [*fixed, *response.headers]
        self._write(h11.Response(status_code=response.status, headers=headers))
        self._write(h11.Data(data=response.body))
        self._write(h11.EndOfMessage())
        await self._drain()

    def _write(self, event: h11.Event) -> None:
        data = self.wire.send(event)
        if data:
            self.writer.write(data)

    async def _drain(self) -> None:
        async with asyncio.timeout(self.limits.write_seconds):
            await self.writer.drain()

    async def _refuse(self, error: HttpError) -> None:
        """Send the error if an answer is still possible; the caller then closes the connection."""
        if self.wire.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        response = error_response(error)
        closing = (*response.headers, ("connection", "close"))
        await self._send(replace(response, headers=closing))
        await _pass_over(self.reader, self.writer, self.limits.read_seconds)


async def _pass_over(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float
) -> None:
    """Send nothing more, and discard the rest of a request.

    Closing while bytes arrive resets the connection, and the client may miss the answer.
    """
    writer.write_eof()
    left = _MAX_PASSED_OVER
    async with asyncio.timeout(seconds):
        while left > 0 and (data := await reader.read(_CHUNK)):
            left -= len(data)


def _long_headers(limits: HttpLimits) -> HttpError:
    text = f"headers have at most {limits.max_header_bytes} bytes"
    return HttpError(431, text, code="headers_too_large")


def _too_large(limits: HttpLimits) -> HttpError:
    return HttpError(413, f"a body has at most {limits.max_body_bytes} bytes", code="too_large")
