"""Workers with many operations in flight: slow answers, refused requests, failed starts."""

import threading
import time

import pytest
from tests.machine import seconds, wait_until

from lightrft.config import TrainConfig
from lightrft.rewards.process import WorkerTask
from lightrft.rollout.agents.agent_pool import AgentEnd, AgentPool
from lightrft.rollout.workers import SharedWorker

AGENT = """
import asyncio, os, pathlib
starts = pathlib.Path(__file__).with_name("starts")
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
if number == 1:
    raise OSError("Stale file handle")
async def run(base_url, api_key, row):
    await asyncio.sleep(row.get("seconds", 0))
    return 1.0
"""
DRIPS = """
import threading, time
from lightrft.rewards.worker import framed, read_frame
from lightrft.rollout.running_call import Running
class Handler:
    def describe(self):
        return None
    def serve(self, requests, answers, *, failure, inherited):
        running = Running(inherited[0])
        def beat():
            while True:
                running.beat()
                time.sleep(0.1)
        threading.Thread(target=beat, daemon=True).start()
        while (message := read_frame(requests)) is not None:
            frame = framed({"number": message["number"], "ok": "x" * 800})
            for start in range(0, len(frame), 100):
                answers.write(frame[start : start + 100])
                answers.flush()
                time.sleep(message["request"])
make = Handler
"""


@pytest.fixture
def agent(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    return f"{tmp_path / 'agent.py'}:run"


def test_an_answer_that_grows_slowly_is_whole(tmp_path, monkeypatch):
    (tmp_path / "drips.py").write_text(DRIPS)
    monkeypatch.syspath_prepend(tmp_path)
    worker = SharedWorker(WorkerTask("drips", "make"))
    worker.start()
    limit = seconds(1.0)
    assert len(worker.send(limit / 4, seconds=limit).result()) == 800  # in nine pieces
    worker.close()


def test_a_request_that_cannot_be_sent_leaves_the_others_alone(agent):
    task = WorkerTask("lightrft.rollout.agents.agent_worker", "load_agents", (agent, ""))
    worker = SharedWorker(task)
    worker.start()
    limit = seconds(1.0)
    asked = {
        "operation": "run",
        "episode": "0",
        "arguments": ("u", "k", {"lock": threading.Lock()}),
    }
    with pytest.raises(TypeError):
        worker.send(asked, seconds=limit)
    time.sleep(0.75 * limit)
    asked["arguments"] = "u", "k", {"seconds": 0.6 * limit}
    assert worker.send(asked, seconds=limit).result() == [1.0, {}]
    worker.close()


def test_a_worker_whose_first_start_fails_is_started_again(agent):
    pool = AgentPool(TrainConfig(agent=agent, apply_chat_template=True, environment_workers=2))
    ends = []
    pool.run({number: ("u", "k", {}) for number in range(2)}, ends.append)
    assert wait_until(lambda: len(ends) == 2)
    pool.close()
    assert [end.failure for end in ends if isinstance(end, AgentEnd)] == ["", ""]
