"""Comparisons with other packages have the fixtures and the hooks of the tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import *  # noqa: F403
from tests.machine import wait_until


@pytest.fixture(scope="session")
def openenv_server():
    """Host and port of OpenEnv's own server; its packages may live in another environment."""
    program = os.environ.get("LIGHTRFT_OPENENV_PYTHON")
    if program is None:
        reason = "openenv is not installed: name a Python that has it in LIGHTRFT_OPENENV_PYTHON"
        pytest.importorskip("openenv.core", reason=reason)
        program = sys.executable
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Path(__file__).with_name("openenv_server.py")
    process = subprocess.Popen([program, str(server), str(port)])

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert wait_until(answers, 240.0)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30.0)
