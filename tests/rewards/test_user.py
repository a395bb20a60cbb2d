"""Reward functions of a user's file: calls, checks, deadlines, crashes."""

import time

import psutil
import pytest
from tests.machine import seconds
from tests.programs import run_python
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError, build_reward
from lightrft.strategy.config import ConfigError

SOURCE = """
import os, sys, time
import numpy as np
from helper_beside_the_file import HALF

print("on import")

def exact(responses, labels):
    print("a line on stdout", flush=True)
    return [HALF if r == l else 0 for r, l in zip(responses, labels)]

def parts(responses, level=None, **columns):
    assert sorted(columns) == ["extra", "labels", "prompts"], columns
    return [{"reward": 2.0, "style": 0.25, "length": len(r)} for r in responses]

def summed(prompts, responses, labels): return [{"a": 1, "b": np.float32(0.5)} for _ in responses]
def array(responses): return np.arange(len(responses), dtype=np.float32)
def column(responses, level): return [float(x) for x in level]
def counts(responses, calls=[]):
    calls.append(1)
    return [float(len(calls))] * len(responses)

def short(responses): return [1.0]
def text(responses): return "11"
def nothing(responses): pass
def words(responses): return [1.0, "good"]
def not_finite(responses): return [{"a": 1.0}, {"a": float("nan")}]
def empty(responses): return [{}, {}]
def raises(responses): return deeper(responses)
def deeper(responses): return [{}["missing"]]
def leaves(responses): sys.exit(3)
def dies(responses): os._exit(9)
def killed(responses): os.kill(os.getpid(), 11)
def hangs(responses):
    if responses[0] == "hang":
        while True: pass
    return [1.0] * len(responses)

def no_responses(prompts): return [1.0]
def positional(responses, query, /): return [1.0]
def lambd(responses, needed): return [1.0]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_beside_the_file.py").write_text("HALF = 0.5\n")
    path = tmp_path / "my_reward.py"
    path.write_text(SOURCE)
    return path


def _score(file, name, responses=("a", "b"), columns=None, seconds=60.0):
    config = TrainConfig(reward_timeout_seconds=seconds)
    with build_reward([f"{file}:{name}"], config=config) as f:
        return results_of(f, list(responses), ["a", "c"], **columns or {})


@pytest.mark.full
def test_numbers_dicts_arrays_and_columns(file):
    columns = {"level": [7, 8], "extra": [object, object]}
    exact = _score(file, "exact", columns=columns)
    assert [result.reward for result in exact] == [0.5, 0.0]
    assert exact[0].components == {"exact": 0.5}
    (first, _) = _score(file, "parts", columns=columns)
    assert first.reward == 2.0
    assert first.components == {"parts": 2.0, "style": 0.25, "length": 1.0}
    (first, _) = _score(file, "summed")
    assert (first.reward, dict(first.components)) == (1.5, {"summed": 1.5, "a": 1.0, "b": 0.5})
    assert [result.reward for result in _score(file, "array")] == [0.0, 1.0]
    assert [result.reward for result in _score(file, "column", columns=columns)] == [7.0, 8.0]


def test_the_process_lives_on_between_calls_and_ends_with_close(file):
    reward = build_reward([f"{file}:counts"])
    for expected in (1.0, 2.0):
        (result,) = results_of(reward, ["a"])
        assert result.reward == expected
    assert reward.score([], [], [], {}) == []
    pid = reward.functions[0].workers.workers[0].pid
    reward.close()
    reward.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    "name, message",
    [
        ("short", "one result per response, 2 in all, got 1"),
        ("text", "expected a list of 2 numbers or dicts, got str"),
        ("nothing", "got NoneType"),
        ("words", "result 1: expected a number, got 'good'"),
        ("not_finite", "result 1, key 'a': expected a finite number, got nan"),
        ("empty", "result 0 is an empty dict"),
        ("leaves", "SystemExit: 3"),
        ("dies", "ended with exit code 9"),
        ("killed", "ended by SIGSEGV .a crash in native code"),
        ("column", r"needs the argument 'level', which is no column.*it has no other columns"),
    ],
)
def test_wrong_results_and_deaths_name_the_function(file, name, message):
    with pytest.raises(RewardError, match=message) as caught:
        _score(file, name)
    assert f"my_reward.py:{name}" in str(caught.value)


def test_a_traceback_starts_in_the_users_file(file):
    with pytest.raises(RewardError, match="failed: KeyError: 'missing'") as caught:
        _score(file, "raises")
    text = str(caught.value)
    assert text.count("my_reward.py") == 3  # the name, and its two frames
    assert "in deeper" in text
    assert text.count("KeyError") == 1
    assert "user_task" not in text
    assert "worker.py" not in text


@pytest.mark.full
def test_a_hanging_call_ends_at_its_deadline_and_the_next_call_works(file):
    config = TrainConfig(reward_timeout_seconds=1.0)
    with build_reward([f"{file}:hangs"], config=config) as reward:
        start = time.monotonic()
        with pytest.raises(RewardError, match="did not return within 1 s for 1 responses"):
            results_of(reward, ["hang"])
        assert time.monotonic() - start < seconds(10)
        (result,) = results_of(reward, ["fine"])
    assert result.reward == 1.0


def test_messages_larger_than_a_pipe_pass(file):
    (result,) = _score(file, "parts", ["x" * 3_000_000], {"extra": [b"y" * 1_000_000]})
    assert result.components["length"] == 3_000_000


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("{file}:exakt", ConfigError, "no function 'exakt'.*did you mean exact"),
        ("{folder}/none.py:f", ConfigError, "no file .*none.py"),
        ("{file}", ConfigError, "expected FILE.py:FUNCTION"),
        ("{file}:no_responses", RewardError, r"keyword argument responses.*\(prompts\)"),
        ("{file}:positional", RewardError, "must take the keyword argument responses"),
        ("{folder}/broken.py:f", RewardError, r"(?s)loaded: SyntaxError(?!.*SyntaxError).*\^"),
        ("{folder}/imports.py:f", RewardError, "could not be loaded: ModuleNotFoundError.*no_such"),
    ],
)
def test_faults_are_found_before_the_first_call(file, name, kind, message):
    (file.parent / "broken.py").write_text("def f(:\n")
    (file.parent / "imports.py").write_text("import no_such_module\n")
    with pytest.raises(kind, match=message):
        build_reward([name.format(file=file, folder=file.parent)])


def test_an_unguarded_script_is_not_run_again_by_its_workers(file, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "print('start')\n"
        "from lightrft.rewards import build_reward\n"
        f"with build_reward([{str(file) + ':array'!r}]) as reward:\n"
        "    print(reward.score(['p'], ['a'], [None], {})[0].reward)\n"
    )
    done = run_python(str(script), code=0)
    assert done.stdout.split() == ["start", "0.0"]
    assert "on import" in done.stderr
