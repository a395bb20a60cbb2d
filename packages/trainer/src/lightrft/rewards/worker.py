"""The program of a reward worker process. Run as a file; imports the standard library only.

Messages on stdin and stdout are frames: 8 bytes of length, then the body. The parent sends
pickles, since columns may hold any object. The worker answers in JSON, so the trainer unpickles
nothing that user code made. The first message is `{"path": ..., "module": ..., "factory": ...,
"arguments": ..., "memory_bytes": ...}`. The worker imports `module`, calls `factory(*arguments)`
and answers with `describe()` of the result. Then it answers each request with `handler(request)`,
or leaves the pipes to `handler.serve`. `supervisor.py` starts the worker, and ends it with the
trainer.
"""

import importlib
import io
import json
import os
import pickle
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, Protocol, cast, runtime_checkable

FRAME = struct.Struct("<Q")
# Describes an exception in an answer.
Failure = Callable[[BaseException], dict[str, object]]


class Handler(Protocol):
    """The callable that a task's factory returns."""

    def describe(self) -> object:
        """Return the JSON-able answer to the first message."""
        ...

    def __call__(self, request: object) -> object:
        """Return the JSON-able answer to one request."""
        ...


@runtime_checkable
class Server(Protocol):
    """A handler that reads requests itself, and may answer them in another order."""

    def describe(self) -> object:
        """Return the JSON-able answer to the first message."""
        ...

    def serve(
        self,
        requests: BinaryIO,
        answers: BinaryIO,
        *,
        failure: Failure,
        inherited: tuple[int, ...],
    ) -> None:
        """Serve until there are no more requests."""
        ...


class ReportedError(Exception):
    """A failure whose message is complete; it is shown without a traceback."""


def main() -> None:
    """Serve requests until stdin ends."""
    requests, answers = _private_pipes()
    setup = cast("dict[str, object]", read_frame(requests))
    handler: Handler | Server | None = None
    try:
        handler = _start(setup)
        answer = {"ok": handler.describe()}
    except BaseException as err:  # noqa: BLE001 - the parent decides what to do
        answer = _failure(err, setup)
    write_frame(answers, framed(answer))
    if isinstance(handler, Server):
        inherited = cast("tuple[int, ...]", setup["inherited"])
        failure = partial(_failure, setup=setup)
        handler.serve(requests, answers, failure=failure, inherited=inherited)
        return
    while handler is not None:
        request = read_frame(requests)
        if request is None:
            return
        try:
            answer = {"ok": handler(request)}
        except BaseException as err:  # noqa: BLE001 - SystemExit of user code included
            answer = _failure(err, setup)
        write_frame(answers, framed(answer))


def _start(setup: dict[str, object]) -> Handler | Server:
    sys.path[:] = cast("list[str]", setup["path"])
    memory_bytes = cast("int | None", setup["memory_bytes"])
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    module = importlib.import_module(str(setup["module"]))
    factory = getattr(module, str(setup["factory"]))
    return cast("Handler | Server", factory(*cast("tuple[object, ...]", setup["arguments"])))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to new descriptors, so that output of user code does not mix with answers."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    cast("io.TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    return requests, answers


def _failure(err: BaseException, setup: dict[str, object]) -> dict[str, object]:
    kind = type(err).__name__
    if isinstance(err, ReportedError):
        return {"error": str(err), "kind": kind, "traceback": ""}
    frames = traceback.extract_tb(err.__traceback__)
    shown_file = setup.get("shown_file")
    first = next((i for i, frame in enumerate(frames) if frame.filename == shown_file), None)
    shown = frames[first:] if first is not None else []
    lines = [
        *traceback.format_list(shown),
        # Without type and message, which are the error itself.
        *(
            part
            for part in traceback.format_exception_only(err)
            if part.partition(":")[0].strip().rpartition(".")[2] != kind
        ),
    ]
    return {"error": f"{kind}: {err}", "kind": kind, "traceback": "".join(lines).rstrip()}


def read_frame(pipe: BinaryIO) -> object:
    """Wait for a message and return it; None after the last one."""
    header = pipe.read(FRAME.size)
    if len(header) < FRAME.size:
        return None
    return pickle.loads(pipe.read(FRAME.unpack(header)[0]))


def take_frames(received: bytearray) -> list[bytes]:
    """Remove the complete frames from what was received, and return their bodies."""
    bodies = []
    while len(received) >= FRAME.size:
        stop = FRAME.size + int(FRAME.unpack_from(received)[0])
        if len(received) < stop:
            break
        bodies.append(bytes(received[FRAME.size : stop]))
        del received[:stop]
    return bodies


def framed(answer: object) -> bytes:
    """Return the frame of an answer."""
    body = json.dumps(answer).encode()
    return FRAME.pack(len(body)) + body


def write_frame(pipe: BinaryIO, frame: bytes) -> None:
    """Write all of it at once."""
    pipe.write(frame)
    pipe.flush()


if __name__ == "__main__":
    # Tasks import this module by name; their ReportedError must be this one.
    sys.modules["lightrft.rewards.worker"] = sys.modules["__main__"]
    main()
