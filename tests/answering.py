"""A server on the loopback interface whose answers are a function of what it is asked."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, dict[str, str], bytes], tuple[int, object]]


@contextmanager
def answering(answer):
    """Yield the address of a server.

    Args:
        answer: Function of the path, the headers and the body of a request; returns a status and
            what is written: bytes as they are, anything else as JSON.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version, wbufsize = "HTTP/1.1", -1

        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(self.path, dict(self.headers.items()), body)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """The client may give up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
