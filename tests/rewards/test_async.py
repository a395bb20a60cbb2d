"""Async reward functions: awaited together, in one loop, with results in order."""

import asyncio

import pytest

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.rewards import RewardError, build_reward

SOURCE = """
import asyncio

most = now = 0

async def grade(response):
    global now, most
    now += 1
    most = max(most, now)
    await asyncio.sleep(0.3 / (1 + int(response)))
    now -= 1
    return {"reward": float(response), "most": float(most)}

async def batch(responses):
    return [await grade(response) for response in responses]

async def together(responses):
    return [grade(response) for response in responses]

def plain(responses):
    return [grade(response) for response in responses]

loops = []

async def loop(responses):
    loops.append(asyncio.get_running_loop())
    return [float(loops[0] is loops[-1] and len(loops))] * len(responses)

async def wrong(responses):
    raise ValueError("no")

async def short(responses):
    return []

async def hangs(responses):
    await asyncio.Event().wait()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(SOURCE)
    return path


def ask(name, count=4, *, times=1, **options):
    texts = [str(index) for index in range(count)]
    with build_reward([name], config=TrainConfig(**options)) as reward:
        for _ in range(times):
            found = reward.score(texts, texts, [None] * count, {})
    return found


@pytest.mark.parametrize("name, most", [("batch", 1), ("together", 4), ("plain", 4)])
def test_results_keep_their_order_and_awaitables_overlap(file, name, most):
    """The later responses are ready first."""
    found = ask(f"{file}:{name}")
    assert [result.reward for result in found] == [0.0, 1.0, 2.0, 3.0]
    assert found[-1].components["most"] == most


@pytest.mark.full
def test_all_calls_share_one_loop(file):
    assert [result.reward for result in ask(f"{file}:loop", times=3)] == [3.0] * 4


@pytest.mark.parametrize(
    "name, message",
    [("wrong", "ValueError: no"), ("short", "4 in all, got 0"), ("hangs", "did not return within")],
)
def test_failures_are_those_of_plain_functions(file, name, message):
    with pytest.raises(RewardError, match=message):
        ask(f"{file}:{name}", reward_timeout_seconds=1.0)


async def _double(responses):
    await asyncio.sleep(0)
    return [2 * float(response) for response in responses]


def test_a_function_of_this_process_is_awaited_also_inside_a_running_loop(monkeypatch):
    # Private: a name that is registered for good would reach later tests.
    monkeypatch.setitem(REWARDS.entries, "doubled", _double)

    async def notebook():
        return ask("doubled", times=2)

    for found in (ask("doubled"), asyncio.run(notebook())):
        assert [result.reward for result in found] == [0.0, 2.0, 4.0, 6.0]
