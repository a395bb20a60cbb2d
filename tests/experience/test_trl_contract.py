"""TRL's contract by scripted episodes: its result where that is sound, ours where it is a fault."""

import importlib.util
import json
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "environment_stage", Path(__file__).with_name("test_environments.py")
)
environments = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(environments)
Stage, call = environments.Stage, environments.call
LONG = {"prompt_max_len": 3000}  # five schemas, a byte a token


@pytest.fixture(scope="module", autouse=True)
def close_pools():
    yield
    for pool in environments.POOLS.values():
        pool.close()
    environments.POOLS.clear()


def play(tmp_path, turns, *, environment="Contract", **keywords):
    """The first of two equal episodes, what was answered turn by turn, and its reward."""
    stage = Stage(tmp_path, lambda request_id: turns, environment=environment, **LONG, **keywords)
    rollouts, rewards = stage.sample()
    answers = [[a.text for a in turn] for turn in rollouts[0].conversation.answers]
    return stage, rollouts[0], answers, rewards[0].reward


# What the model says in its first turn, and what it is answered.
CASES = {
    "inherited methods count": (call("inherited", text="a"), ["said a"]),
    "a default need not be given": (call("inherited"), ["said x"]),
    "static methods count": (call("fixed"), ["fixed"]),
    "missing arguments are none": ('<tool_call>\n{"name": "fixed"}\n</tool_call>', ["fixed"]),
    "text after a call is ignored": (call("fixed") + "\nand so on", ["fixed"]),
    "text before a call is ignored": ("well\n" + call("fixed"), ["fixed"]),
    "a number as text is cast": (call("later", number="7"), ["later 7"]),
    "an unclosed call of an ended turn": (call("fixed").removesuffix("</tool_call>"), ["fixed"]),
    # TRL answers asynchronous calls after all others.
    "answers keep the order of calls": (
        call("later", number=1) + call("fixed") + call("later", number=2),
        ["later 1", "fixed", "later 2"],
    ),
    # TRL: the repr of an exception about `**`.
    "arguments as text": (
        '<tool_call>\n{"name": "fixed", "arguments": "{}"}\n</tool_call>',
        [json.dumps({"error": "the arguments of fixed must be an object"})],
    ),
    # TRL: a list is taken for content blocks, and nothing is shown.
    "a list is JSON": (call("columns"), ['["input", "prompt", "target"]']),
    # TRL: both end the episode in silence.
    "a broken call is answered": (
        '<tool_call>\n{"name": "fixed"\n</tool_call>',
        [json.dumps({"error": "a call is no JSON object: Expecting ',' delimiter: line 3 column 1 "
                     "(char 18)"})],
    ),
    "properties and private names are no tools": (
        call("broken") + call("__init__"),
        [
            json.dumps({"error": f"no tool '{name}': there are close, columns, fixed, inherited, "
                        "later"})
            for name in ("broken", "__init__")
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("turn", "expected"), CASES.values(), ids=CASES)
def test_what_a_turn_is_answered(tmp_path, turn, expected):
    stage, rollout, answers, reward = play(tmp_path, [turn, "done"])
    assert answers == [expected]
    assert reward == 1.0
    shown = stage.text(rollout)
    for text in expected:
        assert f"<tool_response>\n{text}\n</tool_response>" in shown


def test_calls_in_thinking_are_not_made(tmp_path):
    _, rollout, answers, _ = play(tmp_path, [f"<think>{call('close')}</think>no"])
    assert answers == []
    assert len(rollout.conversation.turns) == 1


def test_a_public_close_is_a_tool_and_episodes_share_no_instance(tmp_path):
    stage = Stage(
        tmp_path,
        lambda i: [call("close"), "done"] if i == 0 else ["done"],
        environment="Contract",
        **LONG,
    )
    _, rewards = stage.sample()
    assert [r.reward for r in rewards] == [-99.0, 1.0]
    # The next step has new instances as well.
    stage.script = lambda i: ["done"]
    _, rewards = stage.sample()
    assert [r.reward for r in rewards] == [1.0, 1.0]


def test_a_turn_that_another_stop_token_ended_gets_its_end_unsampled(tmp_path):
    stage = Stage(tmp_path, lambda i: [call("fixed"), "done"], environment="Contract", **LONG)
    other = stage.tokenizer.convert_tokens_to_ids("<|im_start|>")
    own = stage.say

    def say(request, index):
        ids, logprobs = own(request, index)
        return ([*ids[:-1], other] if len(ids) > 20 else ids), logprobs

    stage.engine._script = say
    stage.engine._eos_ids = (stage.tokenizer.eos_token_id, other)
    rollouts, _ = stage.sample()
    text = stage.text(rollouts[0])
    assert "</tool_call><|im_start|><|im_end|>\n<|im_start|>user" in text
    completion = rollouts[0].completion
    place = completion.output_token_ids.index(other)
    assert completion.sampled[place : place + 2] == (True, False)


def test_delays_of_tools_change_nothing_that_an_engine_sees(tmp_path):
    """The same requests in the same batches: the same bits, whatever the engine."""
    seen = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        stage = Stage(
            folder, lambda i: [call("count_up")] * (1 + i % 3) + ["done"], environment="Delayed",
            rows=[{"input": f"Find it {i}."} for i in range(2)], environment_workers=2,
        )  # fmt: skip
        batches, generate = [], stage.engine.generate

        def noted(requests, params, batches=batches, generate=generate, **keywords):
            batches.append(list(requests))
            return generate(requests, params, **keywords)

        stage.engine.generate = noted
        rollouts, rewards = stage.sample()
        seen.append((batches, [r.completion for r in rollouts], [r.reward for r in rewards]))
    assert seen[0] == seen[1] == seen[2]
    assert [len(batch) for batch in seen[0][0]] == [4, 4, 2, 1]
