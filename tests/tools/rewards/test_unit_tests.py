"""The reward that runs a program with the tests of its row."""

import json
import tomllib
from pathlib import Path

import pytest
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.rewards import RewardError, build_reward
from lightrft.rewards.consumption import Consumption
from lightrft.tools.rewards import unit_tests
from lightrft.tools.rewards.code_tests import CodeTests, find_code, read_tests

ADD = '["assert add(1, 2) == 3", "assert add(2, 2) == 4"]'
SUM = '[{"input": "1 2\\n", "output": "3\\n"}, {"input": "3 4\\n", "output": "7"}]'
RIGHT = "So:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
RIGHT_ADD = "def add(a, b): return a + b"
RIGHT_SUM = "print(sum(map(int, input().split())))"
CONFIG = TrainConfig(test_timeout_seconds=2.0, reward_timeout_seconds=60.0)


@pytest.fixture(scope="module")
def reward():
    with build_reward(["unit_tests"], config=CONFIG) as made:
        yield made


def test_answers_get_their_own_results_in_their_order(reward):
    responses = [RIGHT, "def add(a, b):\n    return 3", RIGHT_SUM, "print(3)", "def add(", ""]
    labels = [ADD, ADD, SUM, SUM, ADD, ADD]
    results = results_of(reward, responses * 3, labels * 3)
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 3
    passed = [result.components["tests_passed"] for result in results]
    assert passed == [1.0, 0.5, 1.0, 0.5, 0.0, 0.0] * 3


@pytest.mark.full
def test_a_program_over_its_time_counts_as_timeout(reward):
    responses = ["while True: pass", f"{RIGHT_SUM}\nwhile True: pass", RIGHT]
    results = results_of(reward, responses, [ADD, SUM, ADD])
    assert [result.components["timeout"] for result in results] == [1.0, 1.0, 0.0]
    assert [result.reward for result in results] == [0.0, 0.0, 1.0]


FORGED = tomllib.loads(Path(__file__).with_name("forged_tests.toml").read_text("utf-8"))
FORGERIES, VALUES = FORGED["forgeries"], FORGED["values"]


@pytest.mark.parametrize("code", FORGED["pretenders"])
def test_an_end_without_an_error_is_no_proof(reward, code):
    assert results_of(reward, [code], [ADD])[0].reward == 0.0


# No comparisons with a constant.
STATEMENTS = '["assert add(1, 2) == add(2, 1) == 3", "assert (add(2, 2), 1) != (0, 1)"]'


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_comparisons_with_constants_do_not_pass(reward, name):
    (result,) = results_of(reward, [FORGERIES[name]], [ADD])
    assert result.reward == result.components["tests_passed"] == 0.0
    assert result.components["suspicious"] == 1.0
    (honest,) = results_of(reward, [RIGHT], [ADD])
    assert (honest.reward, honest.components["suspicious"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["frames", "objects", "compile", "exec"])
def test_what_runs_other_statements_cannot_be_replaced(reward, name):
    assert results_of(reward, [RIGHT], [STATEMENTS])[0].reward == 1.0
    assert results_of(reward, [FORGERIES[name]], [STATEMENTS])[0].reward == 0.0


def test_values_equal_constants_as_they_do_in_python(reward):
    code = "import collections, decimal, fractions\n"
    code += "\n".join(f"def f{i}(): return {value}" for i, (value, _) in enumerate(VALUES))
    names: dict[str, object] = {}
    exec(code, names)
    equal = [eval(f"f{i}() == {constant}", names) for i, (_, constant) in enumerate(VALUES)]
    assert 15 < sum(equal) < len(VALUES)
    for tests in ("assert f{}() == {}", "assert {1} == f{0}(), 'unequal'"):
        labels = [json.dumps([tests.format(i, c)]) for i, (_, c) in enumerate(VALUES)]
        results = results_of(reward, [code] * len(VALUES), labels)
        assert [result.reward for result in results] == [float(value) for value in equal]


def test_an_output_must_be_whole_and_its_program_end_well(reward):
    label = '[{"input": "", "output": "1\\n2\\n"}]'
    responses = [
        "print(1)\nprint(2)",
        "print('1  ')\nprint('2')\nprint()",
        "print(' 1')\nprint(2)",
        "print(1)\nprint(2)\nraise SystemExit(3)",
        "print(1)",
    ]
    rewards = [r.reward for r in results_of(reward, responses, [label] * len(responses))]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_deadline_of_the_batch_is_an_error_and_no_score():
    config = TrainConfig(test_timeout_seconds=5.0, reward_timeout_seconds=1.5)
    with (
        build_reward(["unit_tests"], config=config) as reward,
        pytest.raises(RewardError, match=r"not all programs ran within 1.5 s: raise --reward_time"),
    ):
        results_of(reward, ["import time; time.sleep(9)"], [ADD])


EVADER = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
end = time.monotonic() + 240
while time.monotonic() < end:
    try:
        child = os.fork()
    except OSError:
        continue
    if not child:
        started = time.process_time()
        while time.process_time() < started + 0.05: pass
        os._exit(0)
"""


@pytest.mark.full
def test_time_of_children_that_nobody_waits_for_costs_their_program_alone():
    config = TrainConfig(test_timeout_seconds=0.3, reward_timeout_seconds=120.0)
    with build_reward(["unit_tests"], config=config) as reward:
        results = results_of(reward, [RIGHT, EVADER + RIGHT_ADD, RIGHT], [ADD] * 3)
    assert [result.reward for result in results] == [1.0, 0.0, 1.0]


@pytest.mark.full
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_program_that_nothing_ends_is_undecided_alone(monkeypatch, num_slots):
    monkeypatch.setattr(Consumption, "is_over", lambda _: False)  # as if it hid from every look
    monkeypatch.setattr(unit_tests, "num_slots", lambda: num_slots)
    config = TrainConfig(test_timeout_seconds=0.2, reward_timeout_seconds=8.0)
    with build_reward(["unit_tests"], config=config) as reward:
        results = results_of(reward, ["import time; time.sleep(60)", *[RIGHT] * 3], [ADD] * 4)
    assert results[0] is None
    assert [result.reward for result in results[1:]] == [1.0] * 3


@pytest.mark.parametrize(
    "label, message",
    [
        ("[]", "expected tests"),
        ("3", "expected tests"),
        ('["assert ("]', "a test is no Python: SyntaxError"),
        ("no python", "a test is no Python: SyntaxError"),
        ('["assert True", {"input": "", "output": ""}]', "every test must be"),
        ('[{"input": 1, "output": ""}]', "every test must be"),
        ('{"inputs": ["1"], "outputs": []}', "as many outputs as inputs"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', "no fn_name"),
    ],
)
def test_labels_that_are_no_tests_are_named(reward, label, message):
    assert message in (reward.label_problem(label) or "")
    with pytest.raises(RewardError, match="label of sample 0"):
        results_of(reward, [RIGHT], [label])


def test_the_three_forms_of_labels():
    pairs = CodeTests(pairs=(("1 2\n", "3\n"), ("3 4\n", "7")))
    assert read_tests(SUM) == pairs
    assert read_tests('{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7"]}') == pairs
    assert read_tests("assert add(1, 2) == 3\n") == CodeTests(asserts=("assert add(1, 2) == 3\n",))


@pytest.mark.parametrize(
    "response, code",
    [
        ("x = 1", "x = 1"),
        ("a\n```\nx = 1\n```\nb\n```python\nx = 2\n```\nc", "x = 2\n"),
        ("```py\nx = 1", "x = 1\n"),
        ("~~~\n```\n~~~", "```\n"),
        ("``` \n```", "\n"),
    ],
)
def test_the_last_block_of_a_response_is_its_program(response, code):
    assert find_code(response) == code


def test_without_a_sandbox_it_runs_only_if_told_and_says_so(caplog):
    config = TrainConfig(sandbox="unsafe", test_timeout_seconds=2.0)
    with build_reward(["unit_tests"], config=config) as reward:
        results = results_of(reward, [RIGHT, RIGHT_SUM, "x"], [ADD, SUM, ADD])
    assert [result.reward for result in results] == [1.0, 1.0, 0.0]
    assert "can use the network" in caplog.text
