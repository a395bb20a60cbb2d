"""Operations of several episodes that overlap in one worker, and what each has of its own."""

import asyncio
import io
import json
import os
import pickle
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
from tests.machine import seconds, wait_until

from lightrft.config import TrainConfig
from lightrft.rewards.worker import FRAME
from lightrft.rollout.agents.agent_worker import HostedAgents
from lightrft.rollout.environments.pool import EnvironmentPool
from lightrft.rollout.operation_loop import OperationLoop
from lightrft.rollout.running_call import Running
from lightrft.rollout.workers import EpisodeError

HERE = Path(__file__).parent
CASES = HERE / "overlapping_environments.py"


@pytest.fixture(scope="module")
def pool_of():
    """Workers are slow to start, so those of one class serve all tests."""
    pools = {}

    def make(name, *, file=CASES, workers=1, **options):
        if (name, workers) not in pools:
            options |= {"environment": f"{file}:{name}", "apply_chat_template": True}
            config = TrainConfig(environment_workers=workers, **options)
            pools[name, workers] = EnvironmentPool(config)
        return pools[name, workers]

    yield make
    for pool in pools.values():
        pool.close()


class Player:
    """Plays calls of episodes on a pool; each tells its answers and in which worker they came."""

    def __init__(self, pool, *, limit=60.0):
        self.pool, self.limit = pool, limit

    def play(self, number, calls, host):
        host.seconds = self.limit
        told = [self.ask(host, number, "reset", -1, row={})]
        for place, (name, arguments) in enumerate(calls):
            answer = self.ask(host, number, "call", place, name=name, arguments=arguments)
            told.append(answer["text"])
        told.append(self.ask(host, number, "reward", len(calls)))
        self.ask(host, number, "close", 0)
        return told, host.generation

    def ask(self, host, number, operation, place, **details):
        return host.ask(operation, draws=(number, place), **details)

    def begin(self, episodes):
        """Futures of episodes, all begun at once."""
        return {
            number: self.pool.begin(number, partial(self.play, number, calls))
            for number, calls in episodes.items()
        }

    def at_once(self, episodes):
        return {number: future.result() for number, future in self.begin(episodes).items()}


@pytest.mark.full
def test_coroutines_of_one_worker_wait_for_each_other(pool_of):
    player = Player(pool_of("Meeting"))
    found = player.at_once({number: [("meet", {})] * 3 for number in range(2)})
    assert found[0] == found[1]
    # A call that fails, in a task as well, is told to its own episode.
    found = player.at_once({0: [("raise_error", {}), ("exit_in_a_task", {})], 1: [("meet", {})]})
    assert found[0][0][1] == '{"error": "ValueError: bang"}'
    assert "SystemExit: 3" in found[0][0][2]
    assert found[1][0][1].isdigit()


@pytest.mark.full
def test_functions_take_turns_and_may_run_an_event_loop_of_their_own(pool_of):
    player = Player(pool_of("Meeting"))
    episodes = {number: [("own_loop", {})] for number in range(1, 4)} | {0: [("meet", {})]}
    found = player.at_once(episodes | {4: [("meet", {})]})
    assert [found[number][0][1] for number in range(1, 4)] == ["ran"] * 3


@pytest.mark.full
def test_the_time_of_other_episodes_is_not_charged(pool_of, tmp_path):
    limit = seconds(3)
    player = Player(pool_of("Meeting"), limit=limit)
    resting = [("rest", {"seconds": 0.5 * limit})] * 3 + [("open", {"seconds": 0.0})]
    found = player.at_once({0: [("wait", {"path": str(tmp_path / "waits")})], 1: resting})
    assert found[0][0][1] == "open"
    assert found[1][0][1:-1] == ["rested"] * 3 + ["opened"]


@pytest.mark.full
def test_draws_do_not_depend_on_what_overlaps(pool_of):
    calls = [("draw", {"count": 3}), ("wait_for_the_task", {}), ("draw", {"count": 1})]
    episodes = dict.fromkeys(range(6), calls)
    file = HERE / "drawing_environment.py"
    one, three = (Player(pool_of("Drawing", file=file, workers=n)) for n in (1, 3))
    alone = {}
    for number in episodes:
        alone |= one.at_once({number: calls})
    told = {number: texts for number, (texts, _) in alone.items()}
    assert {number: texts for number, (texts, _) in one.at_once(episodes).items()} == told
    assert {number: texts for number, (texts, _) in three.at_once(episodes).items()} == told
    # None of the draws of an episode, its tasks' included, is that of another operation or task.
    numbers = [word for texts in told.values() for text in texts[:-1] for word in words(text)]
    assert len(numbers) == len(set(numbers)) == 6 * 3 * (2 + 3 + 12 + 8)


def words(text):
    return "".join(c if c.isdigit() or c == "." else " " for c in text).split()


@pytest.mark.full
@pytest.mark.parametrize(
    "what, reason, num_ends",
    [
        ("hang", "it was cancelled", 0),
        ("hold on", "its worker was killed", 1),
        ("block", "its worker was killed", 1),
        ("exit", "exit code 3", 1),
    ],
)
def test_what_ends_a_worker_fails_alone(pool_of, what, reason, num_ends):
    player = Player(pool_of("Faulty"), limit=seconds(2))
    calls = [("act", {"what": "wait", "path": ""})] * 3
    expected = player.at_once(dict.fromkeys(range(4), calls))
    bad = [calls[0], ("act", {"what": what, "path": ""})]
    futures = player.begin({0: calls, 1: bad, 2: calls, 3: calls})
    wait(futures.values())
    failure = futures[1].result()
    assert isinstance(failure, EpisodeError)
    assert reason in str(failure)
    for number in (0, 2, 3):
        assert futures[number].result()[0] == expected[number][0]
    # The next episode says in which worker it is.
    assert player.at_once({7: calls})[7][1] == expected[0][1] + num_ends


@pytest.mark.full
def test_where_nobody_knows_what_ended_a_worker_calls_are_repeated_one_at_a_time(pool_of, tmp_path):
    player = Player(pool_of("Faulty"))
    path = str(tmp_path / "was_killed")
    calls = [("act", {"what": "be killed", "path": path})]
    before = player.at_once({9: [("act", {"what": "wait", "path": path})]})[9][1]
    found = player.at_once(dict.fromkeys(range(3), calls))
    assert {generation for _, generation in found.values()} == {before + 1}
    assert all(texts[1].startswith("1 ") for texts, _ in found.values())


@pytest.mark.full
@pytest.mark.parametrize(
    "what", ["unknown signal", "forge a number", "forge text", "forge a beginning"]
)
def test_whatever_an_episode_does_to_its_worker_it_fails_and_nobody_waits(pool_of, what, tmp_path):
    player = Player(pool_of("Faulty"), limit=seconds(4))
    path = str(tmp_path / "file")
    futures = player.begin({0: [("act", {"what": what, "path": path})]})
    assert wait(futures.values(), timeout=seconds(60)).done
    assert isinstance(futures[0].result(), EpisodeError)
    after = player.at_once({1: [("act", {"what": "nothing", "path": path})]})
    assert after[1][0][1].startswith("1 ")


def test_an_answer_that_cannot_be_written_is_an_error_of_its_operation():
    async def perform(request):
        nested = []
        for _ in range(5000):
            nested = [nested]
        return nested

    requests, sending = os.pipe()
    answers, request = io.BytesIO(), {"operation": "call", "episode": "0", "draws": (0, 0)}
    body = pickle.dumps({"number": 7, "seconds": 60.0, "request": request})
    os.write(sending, FRAME.pack(len(body)) + body)
    os.close(sending)
    running = Running.create()
    loop = OperationLoop(perform, lambda e: {"error": str(e)}, answers=answers, running=running)
    with open(requests, "rb") as stream:
        loop.run(stream)
    running.close()
    answer = json.loads(answers.getvalue()[FRAME.size :])
    assert answer["number"] == 7
    assert "recursion" in answer["error"]


def test_seconds_of_an_agent_are_those_of_a_clock_though_others_compute():
    limit, lasted = 0.5, []

    async def busy(base_url, api_key, row):
        begun = time.monotonic()
        try:
            while True:
                time.sleep(0.02)
                await asyncio.sleep(0)
        finally:
            lasted.append(time.monotonic() - begun)
            if len(lasted) == 6:
                os.close(sending)

    requests, sending = os.pipe()
    for number in range(1, 7):
        request = {"operation": "run", "episode": str(number), "arguments": ("", "", {})}
        body = pickle.dumps({"number": number, "seconds": limit, "request": request})
        os.write(sending, FRAME.pack(len(body)) + body)
    running = Running.create()
    with open(requests, "rb") as stream:
        HostedAgents(busy).serve(
            stream, io.BytesIO(), failure=lambda e: {"error": str(e)}, inherited=(running.memory,)
        )
    # Without the time of the others each would last six times as long.
    assert len(lasted) == 6
    assert max(lasted) < 3 * limit


@pytest.mark.full
def test_an_episode_that_holds_too_much_memory_fails_alone(pool_of):
    player = Player(pool_of("Hungry", environment_memory_gb=0.8))
    sizes = {0: 1, 1: 1500, 2: 1}
    futures = player.begin({n: [("hold", {"megabytes": size})] for n, size in sizes.items()})
    assert [futures[number].result()[0][1] for number in (0, 2)] == ["held", "held"]
    assert "--environment_memory_gb" in str(futures[1].result())


@pytest.mark.full
def test_waiting_operations_end_with_their_pool(pool_of, tmp_path):
    pool, path = pool_of("Meeting", workers=2), tmp_path / "waits"
    futures = Player(pool).begin({0: [("wait", {"path": str(path)})]})
    assert wait_until(path.exists)
    pool.close()
    assert isinstance(futures[0].result(), EpisodeError)


ENDS = """
import os, pathlib
(pathlib.Path(__file__).parent / str(os.getpid())).touch()


class Ends:
    def reset(self, **row):
        os._exit(1)
"""


def test_an_episode_whose_worker_ended_is_closed_without_another_worker(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    options = {"environment": f"{tmp_path / 'ends.py'}:Ends", "environment_workers": 1}
    pool = EnvironmentPool(TrainConfig(apply_chat_template=True, **options))
    try:
        work = pool.begin(0, lambda host: host.ask("reset", row={}))
        assert isinstance(work.result(), EpisodeError)
        before = len([*tmp_path.iterdir()])
        assert pool.forget(0).result() is None
        assert len([*tmp_path.iterdir()]) == before
    finally:
        pool.close()
