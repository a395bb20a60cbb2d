"""The real server of vLLM on the loopback interface."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from tests.machine import seconds

START_SECONDS = 720.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Its second process need not compile every module again.
    "PYTHONDONTWRITEBYTECODE": "",
}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(url, server, log):
    ends = time.monotonic() + seconds(START_SECONDS)
    while server.poll() is None and time.monotonic() < ends:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=seconds(5)) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vllm serve did not start: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def serving_model(model, name):
    """The address of a server with a model."""
    port, log = free_port(), model.parent / "server.log"
    command = [
        # What `vllm serve` runs; that command itself needs a distribution of the name vllm.
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # The server's own processes are of its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
