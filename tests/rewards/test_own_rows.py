"""Nothing of one response reaches another: rows, conversations, options and pixels are copies."""

import signal
import threading
from copy import deepcopy

import pytest
from PIL import Image
from tests.rewards.asking import numbers_of, results_of

from lightrft.config import TrainConfig
from lightrft.config.registry import REWARDS
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_image
from lightrft.rewards import CombinedReward, RewardResult, build_reward

SPOILING = """
def spoil(completions, meta, tests, conversations, bonus=(), *, extra=(), **columns):
    values = []
    for row, cases, chat in zip(meta, tests, conversations):
        values.append(row.pop("answer") + len(cases) + len(chat) + row["deep"].pop() + extra.pop())
        cases.clear()
        chat.clear()
    return values
"""
COUNT = 4
WORTH = 2.0 + 3 + 1 + 7


def columns():
    """Rows of one prompt: each response is offered the same objects."""
    meta, tests = {"answer": 2.0, "deep": [7]}, [1, 2, 3]
    chat = [{"role": "user", "content": "Say 2."}]
    return {"meta": [meta] * COUNT, "tests": [tests] * COUNT, "conversations": [chat] * COUNT}


def function_here(source):
    names: dict[str, object] = {}
    exec(source, names)
    return names["spoil"]


@pytest.mark.parametrize("place", ["worker", "here"])
def test_what_a_function_does_to_its_row_reaches_no_other_response_pass_or_function(
    tmp_path, place
):
    path = tmp_path / "spoil.py"
    path.write_text(SPOILING)
    config = TrainConfig(reward_args={"extra": [0.0] * COUNT})
    given, as_it_was = columns(), columns()
    with REWARDS.lent({"spoil": function_here(SPOILING), "again": function_here(SPOILING)}):
        names = [f"{path}:spoil"] if place == "worker" else ["spoil", "again"]
        with build_reward(names, config=config) as reward:
            for _ in range(2):
                assert numbers_of(reward, ["r"] * COUNT, **given) == [len(names) * WORTH] * COUNT
    assert given == as_it_was


class Spoiler:
    """A user's own reward object."""

    needs_labels = False

    def __init__(self, name):
        self.name, self.threads = name, set[str]()

    def score(self, prompts, responses, labels, columns):
        self.threads.add(threading.current_thread().name)
        return [RewardResult(row.pop("answer")) for row in columns["meta"]]

    def close(self):
        pass


def test_objects_with_a_score_get_copies_too():
    given = columns()
    before = deepcopy(given)
    with CombinedReward([Spoiler("one"), Spoiler("two")], [1.0, 1.0]) as reward:
        results = results_of(reward, ["r"] * COUNT, **given)
    assert [result.reward for result in results] == [4.0] * COUNT
    assert given == before


DARKENING = """
def darken(completions, images):
    values = [float(own[0].getpixel((0, 0))[0]) for own in images]
    for own in images:
        own[0].paste((0, 0, 0), (0, 0, 4, 4))
        values[0] += sum(float(each[0].getpixel((0, 0))[0]) for each in images)
    return values
"""


def test_a_picture_that_is_drawn_on_is_one_response_s(tmp_path):
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "grey.png")
    media = Media({"image": [as_image("grey.png", name="grey", folder=tmp_path)]})
    path = tmp_path / "darken.py"
    path.write_text(DARKENING)
    with build_reward([f"{path}:darken"]) as reward:
        results = results_of(reward, ["r"] * 3, images=[media] * 3)
    assert [result.reward for result in results] == [9 + 18 + 9, 9, 9]


def timed(completions):
    """Needs the main thread, as math-verify does."""
    signal.signal(signal.SIGALRM, signal.signal(signal.SIGALRM, signal.SIG_DFL))
    return [1.0] * len(completions)


def test_functions_of_this_process_run_in_its_thread_one_after_another(tmp_path):
    path = tmp_path / "apart.py"
    path.write_text("def apart(completions):\n    return [1.0] * len(completions)\n")
    mine = Spoiler("mine")
    with REWARDS.lent({"timed": timed, "again": timed, "mine": mine}):
        names = ["timed", f"{path}:apart", "again", "mine"]
        with build_reward(names) as reward:
            results = results_of(reward, ["r"] * 2, meta=[{"answer": 1.0}] * 2)
    assert [result.reward for result in results] == [4.0, 4.0]
    assert mine.threads == {"MainThread"}
