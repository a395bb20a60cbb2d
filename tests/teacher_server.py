"""A teacher on the loopback interface that answers as vLLM does, and may be made to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


@dataclass
class Served:
    """What a server answers, and what it was asked.

    Args:
        logits: [tokens] ids -> [tokens, vocab] logits.
        decode: One id -> its text.
        spoil: Changes the entries of an answer, given the number of the question.
        status: Of an answer, given the number of the question.
    """

    logits: Callable[[list[int]], torch.Tensor]
    decode: Callable[[int], str] = str
    spoil: Callable[[list, int], object] = lambda entries, _: entries
    status: Callable[[int], int] = lambda _: 200
    asked: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def answer(self, question: dict, number: int) -> dict:
        ids, k = question["prompt"], question["prompt_logprobs"]
        logprobs = self.logits(ids).double().log_softmax(-1)
        entries: list = [None]
        for place in range(1, len(ids)):
            row = logprobs[place - 1]
            chosen = [*row.topk(k).indices.tolist(), ids[place]]
            entries.append(
                {
                    str(i): {"logprob": float(row[i]), "decoded_token": self.decode(i)}
                    for i in dict.fromkeys(chosen)
                }
            )
        return {"choices": [{"index": 0, "prompt_logprobs": self.spoil(entries, number)}]}


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with served.lock:
                number = len(served.asked)
                served.asked.append(question)
                served.headers.append(dict(self.headers.items()))
                status = served.status(number)
                found = served.answer(question, number) if status == 200 else {"error": "busy"}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
