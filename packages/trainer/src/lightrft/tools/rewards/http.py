"""HTTP client for all requests to other machines, with limits on time, size and address.

A request is repeated while the service is busy or unreachable. One deadline covers connecting,
sending, waiting, reading and pauses. Answers are bounded, never compressed and never redirected.
Each failure is a `RequestError` of one line without credentials.

httpx is imported at the first request.
"""

import asyncio
import base64
import contextlib
import importlib
import ipaddress
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from lightrft.config.files import finite_float, refuse_constant
from lightrft.config.options import MASK, is_number
from lightrft.config.printable import one_line

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
# Statuses of a service that is starting, restarting or overloaded.
TEMPORARY_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 10.0
# A service that answers garbage is not going to recover.
MAX_GARBLED_ANSWERS = 3
_SAID_BYTES = 800
# Shorter credentials are replaced in errors only: in an answer they may be an ordinary number.
_MIN_HIDDEN_CHARACTERS = 8


class RequestError(Exception):
    """A request that got no usable answer.

    Args:
        message: One line without credentials and control characters.
        is_temporary: Whether the same request may succeed later.
        is_garbled: Whether the answer was not HTTP.
        wait_seconds: Seconds that the service asks to wait, or 0.
    """

    def __init__(
        self,
        message: str,
        *,
        is_temporary: bool = False,
        is_garbled: bool = False,
        wait_seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.is_garbled = is_garbled
        self.wait_seconds = wait_seconds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Args:
        total_seconds: Deadline of the whole request, repetitions included.
        connect_seconds: Deadline of one attempt to connect.
        max_bytes: Size of the longest answer.
        concurrency: Number of requests at once.
    """

    total_seconds: float
    connect_seconds: float = 10.0
    max_bytes: int = 16 << 20
    concurrency: int = 8


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request.

    Args:
        url: Address, http or https; `USER:PASSWORD@` becomes an Authorization header.
        body: Body of a POST request; None sends a GET request.
        headers: Further headers beside those of the client.
    """

    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def without_credentials(self, text: str, *, shortest: int = 1) -> str:
        """Return a received text without the credentials that this request sends.

        Args:
            text: Text that may repeat them.
            shortest: Length of the shortest values that are replaced.
        """
        values = set[str]()
        for name, value in self.headers.items():
            if name != "content-type":
                values |= {value, value.rpartition(" ")[2]}
        with contextlib.suppress(ValueError):  # an address that cannot be read
            parts = urlsplit(self.url)
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            basic = base64.b64encode(f"{user}:{password}".encode()).decode()
            values |= {password, basic, *(value for _, value in parse_qsl(parts.query))}
        spelled = {s for v in values for s in (v, quote(v, safe=""), v.replace("/", "\\/"))}
        for value in sorted(spelled, key=len, reverse=True):
            if len(value) >= shortest:
                text = text.replace(value, MASK)
        return text


def json_headers(key: str | None) -> dict[str, str]:
    """Return the headers of a JSON request, with the key of its service if there is one."""
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    return {"content-type": "application/json", **authorization}


class HttpClient:
    """Client that sends requests and returns bodies; holds a thread and connections.

    Args:
        limits: Limits of every request.
        uses_environment: Whether proxies and certificates of the environment are used, except for
            addresses of this machine.
    """

    def __init__(self, limits: RequestLimits, *, uses_environment: bool = False) -> None:
        self.limits = limits
        self._uses_environment = uses_environment
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._slots: asyncio.Semaphore | None = None
        self._clients: dict[tuple[bool, bool], httpx.AsyncClient] = {}

    def fetch(self, request: ClientRequest) -> bytes:
        """Return the body of a successful answer, without the credentials that were sent.

        Raises:
            RequestError: There is no successful answer.
        """
        return self._run(self._fetch(request, []))

    def fetch_all(
        self, requests: Sequence[ClientRequest], *, seconds: list[float] | None = None
    ) -> list[bytes | RequestError]:
        """Return the body or error of each answer; one deadline for all.

        Args:
            requests: Requests to send.
            seconds: List that receives the time of each answer, without the wait for its turn.
        """
        taken = [] if seconds is None else seconds

        async def fetch_one(request: ClientRequest) -> bytes | RequestError:
            try:
                return await self._fetch(request, taken)
            except RequestError as error:
                return error

        async def gather() -> list[bytes | RequestError]:
            return list(await asyncio.gather(*map(fetch_one, requests)))

        return self._run(gather())

    def close(self) -> None:
        """End the thread and the connections; may be called twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            clients, self._clients = list(self._clients.values()), {}
            for client in clients:
                asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)

    def _run(self, work: Coroutine[object, object, T]) -> T:
        # On a busy machine the import takes seconds; keep them out of the first deadline.
        importlib.import_module("httpx")
        # A separate loop: the caller's thread may already run one, as in a notebook.
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(self.limits.concurrency)
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="http", daemon=True
                )
                self._thread.start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _fetch(self, request: ClientRequest, taken: list[float]) -> bytes:
        """Repeat until there is an answer, the request is refused, or time is over.

        Its time, without the wait for its turn, is added to `taken`.
        """
        seconds, shown = self.limits.total_seconds, shown_address(request.url)
        num_attempts, num_garbled, pause = 0, 0, FIRST_WAIT_SECONDS
        last: RequestError | None = None
        assert self._slots is not None
        try:
            async with asyncio.timeout(seconds) as deadline, self._slots, _timed(taken):
                while True:
                    num_attempts += 1
                    try:
                        return await self._attempt(request)
                    except RequestError as error:
                        last = error
                    num_garbled += last.is_garbled
                    if not last.is_temporary or num_garbled == MAX_GARBLED_ANSWERS:
                        said = request.without_credentials(str(last))
                        raise RequestError(f"{shown}: {said}") from last
                    wait = max(pause, last.wait_seconds)
                    ends = deadline.when() or math.inf
                    if asyncio.get_running_loop().time() + wait >= ends:
                        raise TimeoutError
                    await asyncio.sleep(wait)
                    pause = min(2 * pause, MAX_WAIT_SECONDS)
        except TimeoutError:
            reason = "" if last is None else f": {request.without_credentials(str(last))}"
            raise RequestError(
                f"{shown} gave no answer within {seconds:g} s and {num_attempts} attempts{reason}",
                is_temporary=True,
            ) from None

    async def _attempt(self, request: ClientRequest) -> bytes:
        import httpx

        try:
            client = self._client(request.url)
            method = "GET" if request.body is None else "POST"
            made = client.build_request(
                method, request.url, content=request.body, headers=dict(request.headers)
            )
            answer = await client.send(made, stream=True)
            try:
                return await _read(answer, request, self.limits.max_bytes)
            finally:
                await answer.aclose()
        except httpx.RemoteProtocolError as err:
            raise RequestError(
                f"no HTTP answer: {one_line(str(err))}", is_temporary=True, is_garbled=True
            ) from None
        except (
            httpx.UnsupportedProtocol,
            httpx.LocalProtocolError,
            httpx.InvalidURL,
            ValueError,
        ) as err:
            # Host names and header values that cannot be encoded are ValueErrors.
            raise RequestError(f"the request cannot be sent: {type(err).__name__}") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as err:
            said = one_line(str(err)) or type(err).__name__
            raise RequestError(said, is_temporary=True) from None

    def _client(self, url: str) -> "httpx.AsyncClient":
        import httpx

        trusts = self._uses_environment and not is_loopback(url)
        is_plain = url.lower().startswith("http:")
        if (trusts, is_plain) not in self._clients:
            self._clients[trusts, is_plain] = httpx.AsyncClient(
                # asyncio keeps the overall deadline; httpx would time each read alone.
                timeout=httpx.Timeout(None, connect=self.limits.connect_seconds),
                limits=httpx.Limits(max_connections=self.limits.concurrency),
                follow_redirects=False,
                trust_env=trusts,
                # Loading certificates costs 0.1 s; plain HTTP without redirects needs none.
                verify=not (is_plain and not trusts),
                headers={"accept-encoding": "identity", "user-agent": "lightrft"},
            )
        return self._clients[trusts, is_plain]


@contextlib.asynccontextmanager
async def _timed(taken: list[float]) -> AsyncIterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        taken.append(time.perf_counter() - started)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _read(answer: "httpx.Response", request: ClientRequest, max_bytes: int) -> bytes:
    """Return the body of a successful answer; raise a RequestError for any other."""
    if 300 <= answer.status_code < 400:
        raise RequestError(
            f"status {answer.status_code}: redirects are not followed, give the final address"
        )
    is_right = answer.is_success
    if is_right and "content-encoding" in answer.headers:
        # Unpacking could multiply its size before any limit acts.
        raise RequestError("the answer is compressed, although that was not asked for")
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if not is_right and len(data) >= 2 * _SAID_BYTES:
            break
        if len(data) > max_bytes:
            raise RequestError(f"the answer is longer than {max_bytes} bytes")
    # latin-1 keeps every byte. Replace before cutting: half a key must not leak either.
    shortest = _MIN_HIDDEN_CHARACTERS if is_right else 1
    text = request.without_credentials(data.decode("latin-1"), shortest=shortest)
    body = text.encode("latin-1")
    if is_right:
        return body
    said = one_line(body[:_SAID_BYTES].decode(errors="replace"))
    status = answer.status_code
    raise RequestError(
        f"status {status}, {said!r}" if said else f"status {status}",
        is_temporary=status in TEMPORARY_STATUSES,
        wait_seconds=_wait_seconds(answer.headers.get("retry-after", "")),
    )


def _wait_seconds(text: str) -> float:
    """Return the seconds of a header Retry-After; 0 if it holds none, as with a date."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def shown_address(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(an address that cannot be read)"
    return one_line(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def is_loopback(url: str) -> bool:
    """Return whether an address belongs to this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_json(data: bytes | str) -> object:
    """Return the value of an untrusted JSON text.

    Raises:
        ValueError: The text is no JSON, nested too deeply, or holds NaN, an infinity or a number
            with thousands of digits; the message is one line.
    """
    try:
        return json.loads(data, parse_constant=refuse_constant, parse_float=finite_float)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except ValueError as err:
        raise ValueError(one_line(str(err))) from None


def finite_numbers(values: object, count: int) -> list[float] | None:
    """Return the list as floats if it holds that many finite numbers; else None."""
    if not isinstance(values, list) or len(values) != count:
        return None
    if not all(map(is_number, values)):
        return None
    try:
        numbers = [float(x) for x in values]
    except OverflowError:  # an integer beyond the largest float
        return None
    return numbers if all(map(math.isfinite, numbers)) else None
