"""A page that follows runs: served to this machine alone, rendered anew when their files change."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket

from lightrft.cli.errors import UsageError
from lightrft.config.printable import one_line
from lightrft.reporting.files import (
    CONFIG_FILE,
    EVENTS_FILE,
    START_FILE,
    STEP_FILES,
    SUMMARY_FILE,
)
from lightrft.tools.report.comparison import render_comparison
from lightrft.tools.report.page import render_report

ADDRESS = "127.0.0.1"
MAX_CONNECTIONS = 16
REQUEST_SECONDS = 10.0
# A run that writes nothing becomes one that has crashed.
QUIET_CHECK_SECONDS = 300.0
_WATCHED = (CONFIG_FILE, EVENTS_FILE, START_FILE, SUMMARY_FILE, *STEP_FILES)


class LivePage:
    """The page about runs as their files are now.

    Args:
        folders: Of the runs; several are compared.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._version, self._text = "", b""

    def version(self) -> str:
        """Another one after each change of a file."""
        parts = [str(int(time.time() // QUIET_CHECK_SECONDS))]
        for path in (folder / name for folder in self._folders for name in _WATCHED):
            try:
                found = path.stat()
            except OSError:
                continue
            parts.append(f"{found.st_mtime_ns:x}.{found.st_size:x}")
        return "-".join(parts)

    def text(self) -> bytes:
        """The page; made once for each version, whoever asks."""
        with self._lock:
            version = self.version()
            if version != self._version:
                if len(self._folders) == 1:
                    page = render_report(self._folders[0], version=version)
                else:
                    page = render_comparison(self._folders, version=version)
                self._version, self._text = version, page.encode()
            return self._text


@contextmanager
def serving(folders: Sequence[Path], *, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """A server of the page about `folders`, bound and not yet serving.

    Args:
        folders: Of the runs.
        port: On the loopback address; 0 takes a free one.

    Raises:
        NotARunError: A folder holds no run.
        UsageError: The port is taken or is none.
    """
    page = LivePage(folders)
    page.text()
    try:
        server = _PageServer((ADDRESS, port), _handler(page))
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--port {port}: cannot be used: {error}; choose another, or leave it out"
        ) from error
    try:
        yield server
    finally:
        server.server_close()


class _PageServer(ThreadingHTTPServer):
    """A server with a bounded number of connections."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(
        self, request: socket | tuple[bytes, socket], client_address: object
    ) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket | tuple[bytes, socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


def _handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    answers: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/": ("text/html; charset=utf-8", page.text),
        "/version": ("text/plain; charset=utf-8", lambda: page.version().encode()),
    }

    class PageHandler(BaseHTTPRequestHandler):
        """Gives the page and its version to whoever asks this address by its own name."""

        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            # Another site's name that leads here is one that a page of that site could ask. The
            # port may be another one: that of a tunnel.
            if self.headers.get("Host", "").rpartition(":")[0] not in (ADDRESS, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path not in answers:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            kind, make = answers[self.path]
            status = HTTPStatus.OK
            try:
                body = make()
            except (UsageError, OSError) as error:  # a run that was removed meanwhile
                text = one_line(str(error))
                print(text, file=sys.stderr, flush=True)
                kind, body, status = "text/plain; charset=utf-8", text.encode(), HTTPStatus.GONE
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody waits for these lines."""

    return PageHandler
