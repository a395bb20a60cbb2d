"""What reward functions see of environments, in a process of their own and in the trainer's."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path, PosixPath

import numpy as np
import pytest
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError
from lightrft.rewards.environment_snapshot import (
    MAX_ATTRIBUTE_BYTES,
    EnvironmentSnapshot,
    UnreadableAttributeError,
    keep_attributes,
)
from lightrft.rewards.types import KeptEnvironment
from lightrft.rewards.user import PlainReward, UserReward

FUNCTION = """
class Maze:
    pass


def reads(responses, environments):
    return [float(eval(r, {"e": e, "Maze": Maze})) for r, e in zip(responses, environments)]
"""
CONFIG = TrainConfig(environment="e.py:Maze", apply_chat_template=True)


class Made:
    """Its pickle calls what it names, or sets something on it."""

    def __init__(self, *how) -> None:
        self.how = how

    def __reduce__(self):
        return self.how


@dataclass
class Maze:
    """An author's environment."""

    score: float = 1.5
    place: tuple[int, int] = (1, 2)
    by_number: dict[int, str] = field(default_factory=lambda: {1: "a"})
    path: Path = Path("a/b")
    grid: np.ndarray = field(default_factory=lambda: np.arange(6.0).reshape(2, 3))
    share: np.float32 = field(default_factory=lambda: np.float32(0.5))
    seen: tuple = (date(2026, 1, 2), Decimal("0.1"), Counter("aab"), {1})
    code: object = field(default_factory=lambda: Made(exec, ("raise SystemExit",)))
    lock: object = field(default_factory=threading.Lock)
    corpus: bytes = bytes(MAX_ATTRIBUTE_BYTES + 1)
    words: list[str] = field(default_factory=lambda: ["x" * MAX_ATTRIBUTE_BYTES])
    _hidden: int = 3
    SIZE = 4

    @property
    def half(self) -> float:
        return self.score / 2

    @property
    def broken(self) -> float:
        raise KeyError("no door")

    def walk(self):
        raise AssertionError("no method is called")


@pytest.fixture(scope="module")
def kept():
    attributes = json.loads(json.dumps(keep_attributes(Maze())))  # as it crosses the pipe
    return KeptEnvironment("Maze", attributes)


@pytest.fixture(scope="module")
def reads(tmp_path_factory, kept):
    file = tmp_path_factory.mktemp("rewards") / "r.py"
    file.write_text(FUNCTION)
    reward = UserReward(file, "reads", CONFIG)
    yield lambda text: results_of(reward, [text], environments=[kept])[0].reward
    reward.close()


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("e.score + e.half + e.SIZE", 6.25),
        ("e.place == (1, 2) and e.by_number == {1: 'a'} and e.path.name == 'b'", 1.0),
        ("e.grid.sum() + e.grid.shape[0] + e.share", 17.5),
        ("e.seen[0].year + e.seen[2]['a'] + len(e.seen[3]) + (e.seen[1] > 0)", 2030.0),
        ("isinstance(e, Maze) and not hasattr(e, '_hidden') and not hasattr(e, 'walk')", 1.0),
    ],
)
def test_public_attributes_are_read(reads, expression, expected):
    assert reads(expression) == expected


@pytest.mark.parametrize(
    "expression, message",
    [
        ("e.code", "attribute 'code' of the environment Maze cannot be read here: UnpicklingErro"),
        ("e.code", "it holds builtins.exec: keep numbers, texts, lists, dicts, sets, dates, path"),
        ("e.lock", "attribute 'lock' of the environment Maze cannot be read: TypeError: cannot"),
        ("e.corpus", "attribute 'corpus' of the environment Maze cannot be read: ValueError: it"),
        ("e.words", "attribute 'words' of the environment Maze cannot be read: ValueError: it"),
        ("e.broken", "attribute 'broken' of the environment Maze cannot be read: KeyError: 'no d"),
        ("e.walk()", "no attribute 'walk' of the environment Maze: kept are its public attribut"),
        ("setattr(e, 'score', 2)", "attribute 'score' cannot be set: environments are to be read"),
    ],
)
def test_what_cannot_be_read_is_named(reads, expression, message):
    with pytest.raises(RewardError) as refused:
        reads(expression)
    first, *_ = str(refused.value).splitlines()
    assert message in first


def test_nothing_is_set_on_what_makes_values(kept):
    # PosixPath itself, then a state for it: `name` of every path would be another one.
    forged = b"\x80\x04cpathlib\nPosixPath\nN}X\x04\x00\x00\x00nameX\x06\x00\x00\x00forgeds\x86b."
    attributes = {"patch": {"pickle": base64.b64encode(forged).decode()}, **kept.attributes}
    shown = EnvironmentSnapshot(KeptEnvironment("Maze", attributes), opens_pickles=True)
    with contextlib.suppress(UnreadableAttributeError):
        _ = shown.patch
    assert shown.path.name == "b"
    pickle.loads(forged)  # what is refused would be done
    try:
        assert Path("a/b").name == "forged"
    finally:
        del PosixPath.name


def test_the_trainers_process_opens_no_pickle(kept):
    shown = EnvironmentSnapshot(kept, opens_pickles=False)
    assert (shown.score, shown.half) == (1.5, 0.75)
    with pytest.raises(Exception, match=r"alone are read in the trainer's process.*FILE\.py:FUNC"):
        _ = shown.place


def test_a_failed_episode_has_no_attributes():
    with pytest.raises(AttributeError, match="kept are its public attributes, none, since its"):
        _ = EnvironmentSnapshot(KeptEnvironment(), opens_pickles=True).score


def test_environments_are_offered_where_one_is_played(kept):
    reward = PlainReward("f", lambda environments: [1.0], CONFIG)
    reward.check_columns(())
    with pytest.raises(RewardError, match="reads environments, and none was played"):
        results_of(reward, ["r"])
    reward.close()
    everything = []
    reward = PlainReward("f", lambda **given: everything.append(given) or [1.0], CONFIG)
    results_of(reward, ["r"], environments=[kept])
    assert not reward.reads_environments
    assert "environments" not in everything[0]
    reward.close()
