"""The judge against the real server of vLLM, on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.machine import seconds

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError, build_reward
from lightrft.tools.model_presets import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_SECONDS = 720.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Its second process need not compile every module again.
    "PYTHONDONTWRITEBYTECODE": "",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
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


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server with a tiny random model, named `tiny`."""
    folder = tmp_path_factory.mktemp("judge")
    write_tiny_model(folder / "model", "tiny-qwen3", seed=1)
    port, log = free_port(), folder / "log"
    command = [
        # What `vllm serve` runs; that command itself needs a distribution of the name vllm.
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "model"),
        "--served-model-name",
        "tiny",
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


@pytest.fixture
def ask(address, tmp_path):
    """Scores of responses, with fields of the request."""
    template = tmp_path / "template"
    template.write_text("Grade. {mark} {response} {mark}")

    def call(responses: list[str], *, model: str = "tiny", seconds: float = 120.0, **fields):
        config = TrainConfig(
            judge_url=address,
            judge_model=model,
            judge_template=str(template),
            judge_args=fields,
            reward_timeout_seconds=seconds,
            output_dir=str(tmp_path),
        )
        count = len(responses)
        with build_reward(["judge"], config=config) as reward:
            found = reward.score(["p"] * count, responses, [None] * count, {})
        return [item.reward for item in found]

    return call


# A model that says nothing sensible still keeps to a schema.
SCORES = {"structured_outputs": {"regex": r"Fine\.\nScore: [0-9]"}, "max_tokens": 32}


def test_scores_are_read_from_the_answers_of_the_server(ask, tmp_path) -> None:
    responses = [f"response {index}" for index in range(12)]
    scores = ask(responses, **SCORES)
    assert all(score in [digit / 10 for digit in range(10)] for score in scores)
    assert len(set(scores)) > 1
    answers = [
        json.loads(line)["answer"]
        for file in (tmp_path / "judge_cache").iterdir()
        for line in file.read_text().splitlines()
        if line
    ]
    assert sorted(answers) == sorted(f"Fine.\nScore: {10 * score:.0f}" for score in scores)
    # A continued run asks for nothing: nobody answers within this time.
    assert ask(responses, seconds=1e-3, **SCORES) == scores


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 16, "ignore_eos": True}, "cut at its limit"),
        ({"structured_outputs": {"choice": ["Nine out of ten."]}}, "last line must be 'Score: N'"),
        ({"model": "another"}, "404"),
        ({"temperature": -1}, "400"),
        ({"max_tokens": 100_000}, "400"),
    ],
    ids=["cut", "no-score", "unknown-model", "bad-field", "too-long"],
)
def test_what_the_server_answers_instead_of_a_score_is_an_error(ask, fields, message) -> None:
    with pytest.raises(RewardError, match=message):
        ask(["r"], **{"max_tokens": 64, **fields})
