"""One step of `lightrft train` with each reward that does not compute in the trainer's process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.ranks import find_free_port

from lightrft.cli.main import main

ASYNC = """
import asyncio


async def grade(response):
    await asyncio.sleep(0.01)
    return float(sum(map(ord, response)) % 3)


async def each(responses):
    return [grade(response) for response in responses]
"""
TESTS = '[{"input": "1 2\\n", "output": "3\\n"}]'


class Judge(BaseHTTPRequestHandler):
    """Scores a question by its length."""

    def log_message(self, *_) -> None:
        pass

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.rfile.read(size)
        message = {"role": "assistant", "content": f"Well.\nScore: {size % 7}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def judge_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def train(tmp_path, tiny_model, monkeypatch):
    """Metrics of the one step of a run."""
    rows = [{"prompt": f"add {i} and 2", "answer": TESTS} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(find_free_port())}.items():
        monkeypatch.setenv(name, value)

    def run(reward: str, *more: str, data: str | None = None) -> dict[str, float]:
        data = data or str(tmp_path / "rows.jsonl")
        output = tmp_path / "run"
        arguments = (
            "train",
            "--pretrain",
            str(tiny_model),
            "--prompt_data",
            data,
            "--reward_fn",
            reward,
            "--output_dir",
            str(output),
            "--engine_type",
            "hf",
            "--fsdp",
            "--max_steps",
            "1",
            "--rollout_batch_size",
            "4",
            "--n_samples_per_prompt",
            "2",
            "--train_batch_size",
            "8",
            "--micro_train_batch_size",
            "4",
            "--generate_max_len",
            "8",
            "--prompt_max_len",
            "256",
            "--init_kl_coef",
            "0",
            "--reward_workers",
            "2",
            *more,
        )
        assert main(list(arguments)) == 0
        return json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])

    return run


COLUMNS = ("--input_key", "prompt", "--label_key", "answer")


def test_an_async_function(train, tmp_path):
    (tmp_path / "r.py").write_text(ASYNC)
    metrics = train(f"{tmp_path / 'r.py'}:each", *COLUMNS)
    assert 0 < metrics["reward"] < 2
    assert metrics["step"] == 1


def test_the_judge(train, judge_url):
    metrics = train("judge", "--judge_url", judge_url, "--judge_model", "m", *COLUMNS)
    assert 0 < metrics["reward/judge"] <= 0.6


def test_unit_tests(train):
    metrics = train("unit_tests", *COLUMNS)
    # No random text is a program that adds.
    assert metrics["reward/unit_tests"] == metrics["reward/tests_passed"] == 0
    assert metrics["reward/timeout"] == 0


def test_a_task_of_reasoning_gym(train):
    task = "reasoning_gym:letter_counting"
    metrics = train(task, data=f"{task}?min_words=2&max_words=4")
    assert 0 <= metrics["reward/letter_counting"] <= 1
    assert metrics["reward/scorer_failed"] == 0
