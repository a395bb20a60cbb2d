"""One step of `lightrft train` with each reward that does not compute in the trainer's process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.runs import lines, rollout_options, words, write_inputs

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

    def log_message(self, *_):
        pass

    def do_POST(self):
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
def metrics_of(tmp_path, tiny_model):
    """`metrics_of(reward)`: metrics of the one step of a run."""
    rows = [{"prompt": f"add {i} and 2", "answer": TESTS} for i in range(4)]
    write_inputs(tmp_path, rows, reward=ASYNC)

    def run(reward, **changes):
        common = {
            "pretrain": tiny_model,
            "reward_fn": reward,
            "label_key": "answer",
            "max_steps": 1,
            "n_samples_per_prompt": 2,
            "micro_train_batch_size": 4,
            "prompt_max_len": 256,
            "reward_workers": 2,
        }
        assert main(["train", *words(rollout_options(tmp_path, **common | changes))]) == 0
        return lines(tmp_path / "run" / "metrics.jsonl")[-1]

    return run


@pytest.mark.full
def test_an_async_function(metrics_of, tmp_path):
    metrics = metrics_of(f"{tmp_path / 'reward.py'}:each")
    assert 0 < metrics["reward"] < 2
    assert metrics["step"] == 1


def test_the_judge(metrics_of, judge_url):
    metrics = metrics_of("judge", judge_url=judge_url, judge_model="m")
    assert 0 < metrics["reward/judge"] <= 0.6


def test_unit_tests(metrics_of):
    metrics = metrics_of("unit_tests")
    # No random text is a program that adds.
    assert metrics["reward/unit_tests"] == metrics["reward/tests_passed"] == 0
    assert metrics["reward/timeout"] == 0


@pytest.mark.full
def test_a_task_of_reasoning_gym(metrics_of):
    task = "reasoning_gym:letter_counting"
    data = f"{task}?min_words=2&max_words=4"
    metrics = metrics_of(task, prompt_data=data, input_key="input", label_key="label")
    assert 0 <= metrics["reward/letter_counting"] <= 1
    assert metrics["reward/scorer_failed"] == 0
