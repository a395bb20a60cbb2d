"""TRL's contract by scripted episodes: its result where that is sound, ours where it is a fault."""

import json

import pytest
from tests.rollout.stages import Stage, answers_of, call

from lightrft.datasets.types import DataError
from lightrft.rewards.types import RewardError

LONG = {"prompt_max_len": 3000, "generate_max_len": 800, "max_len": 8000}  # a byte a token


def play(tmp_path, turns, *, environment="Contract", **keywords):
    """The first of two equal episodes, what was answered turn by turn, and its reward."""
    stage = Stage(tmp_path, turns, environment=environment, **LONG, **keywords)
    rollouts, rewards = stage.sample()
    return stage, rollouts[0], answers_of(rollouts[0]), rewards[0].reward


def error(text):
    return json.dumps({"error": text})


UNKNOWN = ("broken", "__init__", "_hidden", "of_class", "get_reward", "reset")
# What the model says in its first turn, and what it is answered.
CASES = {
    "inherited methods count": (call("inherited", text="a"), ["said a"]),
    "a default need not be given": (call("inherited"), ["said x"]),
    "static methods count": (call("fixed"), ["fixed"]),
    "missing arguments are none": ('<tool_call>\n{"name": "fixed"}\n</tool_call>', ["fixed"]),
    "a number as text is cast": (call("later", number="7"), ["later 7"]),
    # TRL answers asynchronous calls after all others.
    "answers keep the order of calls": (
        call("later", number=1) + call("fixed") + call("later", number=2),
        ["later 1", "fixed", "later 2"],
    ),
    # TRL: the repr of an exception about `**`.
    "arguments as text": (
        '<tool_call>\n{"name": "fixed", "arguments": "{}"}\n</tool_call>',
        [error("the arguments of fixed must be an object")],
    ),
    # TRL: a list is taken for content blocks, and nothing is shown.
    "a list is JSON": (call("columns"), ['["input", "prompt", "target"]']),
    # TRL: both end the episode in silence.
    "a broken call is answered": (
        '<tool_call>\n{"name": "fixed"\n</tool_call>',
        [error("a call is no JSON object: Expecting ',' delimiter after '{\"name\": \"fixed\"'")],
    ),
    "properties and private names are no tools": (
        "".join(map(call, UNKNOWN)),
        [
            error(f"no tool '{name}': there are close, columns, fixed, inherited, later")
            for name in UNKNOWN
        ],
    ),
    "a missing argument is named": (call("later"), [error("later: missing argument 'number'")]),
    "an argument of another type is named": (
        call("later", number="x"),
        [error("later: argument 'number' must be integer: got 'x'")],
    ),
    "an argument too many is named": (
        call("later", number=1, more=1),
        [error("later: unknown argument 'more'")],
    ),
}


@pytest.mark.parametrize("turn, expected", CASES.values(), ids=CASES)
def test_what_a_turn_is_answered(tmp_path, turn, expected):
    stage, rollout, answers, reward = play(tmp_path, [turn, "done"])
    assert answers == [expected]
    assert reward == 1.0
    shown, (told, *_) = stage.text(rollout), rollout.conversation.answers
    assert {"error": "malformed"}.get(expected[0][2:7], "ok") == told[0].outcome
    for text in expected:
        assert f"<tool_response>\n{text}\n</tool_response>" in shown


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
    stage = Stage(tmp_path, [call("fixed"), "done"], environment="Contract", **LONG)
    other = stage.tokenizer.convert_tokens_to_ids("<|im_start|>")
    own = stage.say

    def say(request, index):
        ids, logprobs = own(request, index)
        return ([*ids[:-1], other] if len(ids) > 20 else ids), logprobs

    stage.engine.script = say
    stage.engine.eos_ids = (stage.tokenizer.eos_token_id, other)
    rollouts, _ = stage.sample()
    text = stage.text(rollouts[0])
    assert "</tool_call><|im_start|><|im_end|>\n<|im_start|>user" in text
    completion = rollouts[0].completion
    place = completion.output_token_ids.index(other)
    assert completion.sampled[place : place + 2] == (True, False)


def chosen(tmp_path, script, rows, **options):
    """Two samples of each row, whose column `environment` names one of several."""
    return Stage(tmp_path, script, rows=rows, environment="FACTORIES", **{**LONG, **options})


def test_rows_choose_among_several_environments(tmp_path):
    turns = [
        [call("guess", number=7), call("fixed"), "done"],
        [call("columns"), call("count_up"), "done"],
        [call("count_up"), call("count_up"), "done"],
    ]
    rows = [
        {"input": "Find it.", "target": 7, "environment": "guess"},
        {"input": "Say it.", "environment": "contract"},
        {"input": "Count it.", "environment": "made"},
    ]
    stage = chosen(tmp_path, lambda request_id: turns[request_id // 2], rows)
    own = [{"guess"}, {"close", "columns", "fixed", "inherited", "later"}, {"count_up", "slowly"}]
    assert stage.environments.specs.tool_names == tuple(sorted(set.union(*own)))
    rollouts, rewards = stage.sample()
    # Each prompt shows the tools of its environment alone, whether or not `reset` added to it.
    for rollout, names in zip(rollouts, [s for s in own for _ in range(2)], strict=True):
        for name in set.union(*own):
            assert (f'"name": "{name}"' in rollout.prompt.text) == (name in names)
    assert [r.prompt.text for r in rollouts[2:]] == [
        stage.prompts[i // 2].text for i in (2, 3, 4, 5)
    ]
    answers = [[text for turn in answers_of(r) for text in turn] for r in rollouts[::2]]
    # As in TRL, only the choice itself is not given to what was chosen.
    assert answers[0] == ["right", error("no tool 'fixed': there are guess")]
    assert answers[1][0] == '["input", "prompt"]'
    assert answers[2] == ["1", "2"]  # an instance for each episode
    assert [reward.reward for reward in rewards[::2]] == [1.0, 1.0, 3.0]


def test_an_unknown_environment_is_named_before_the_run(tmp_path):
    rows = [{"input": "x", "environment": "guess"}, {"input": "x", "environment": "gess"}]
    with pytest.raises(
        DataError,
        match=r"rows.jsonl.*2.*must name one of guess, contract, told, "
        r"made: got 'gess'",
    ):
        chosen(tmp_path, ["done"], rows)
    with pytest.raises(DataError, match="column 'environment' must name one of"):
        chosen(tmp_path, ["done"], [{"input": "x"}])


TOLD = {
    "nothing": (None, "Say it."),
    "a text": (" Now.", "Say it. Now."),
    "blocks": (
        [{"type": "text", "text": " Right"}, {"type": "text", "text": " now."}],
        "Say it. Right now.",
    ),
    "blocks and texts": ([" Right", {"type": "text", "text": " now."}], "Say it. Right now."),
    "no blocks": ([], "Say it."),
}


@pytest.mark.parametrize("told, expected", TOLD.values(), ids=TOLD)
def test_what_reset_says_stands_at_the_end_of_the_question(tmp_path, told, expected):
    before = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Well"}]
    messages = [*before, {"role": "user", "content": "Say it."}]
    rows = [{"input": x, "environment": "told", "told": told} for x in ("Say it.", messages)]
    stage = chosen(tmp_path, ["done"], rows)
    rollouts, rewards = stage.sample()
    for rollout in rollouts:
        assert f"<|im_start|>user\n{expected}<|im_end|>" in rollout.prompt.text
        shown = stage.tokenizer.decode(rollout.completion.prompt_token_ids)
        assert shown == rollout.prompt.text
    assert rollouts[2].prompt.text.count("Well<|im_end|>") == 1
    assert [r.reward for r in rewards] == [float(len(told or ""))] * 4


RESET, REWARD = "prompt 0: reset failed: Told.reset:? ", "get_reward: expected "


@pytest.mark.parametrize(
    "told, reason",
    [
        (
            [{"type": "image", "image": "x.png"}],
            f"{RESET}answered with an image, and the model reads text",
        ),
        ([" a", 3], f"{RESET}block 2 must be text or an image: got 'int'"),
        ({"a": 1}, f"{RESET}block 1 must be text or an image: got 'dict'"),
        # TRL leaves it out of the mean of its group, and says nothing.
        ("nan", f"{REWARD}a finite number, got nan"),
        ("a text", f"{REWARD}a number, got '0.5'"),
    ],
)
def test_other_answers_end_the_run_in_one_line(tmp_path, told, reason):
    rows = [{"input": "x", "environment": "told", "told": told}]
    stage = chosen(tmp_path, ["done"], rows)
    with pytest.raises(RewardError, match=reason):
        stage.sample()


def test_rows_without_a_prompt_get_theirs_from_reset(tmp_path):
    rows = [{"environment": "told", "told": "Begin."}]
    stage = chosen(tmp_path, ["done"], rows)
    rollouts, _ = stage.sample()
    assert "<|im_start|>user\nBegin.<|im_end|>" in rollouts[0].prompt.text
    assert rollouts[0].prompt.messages == ({"role": "user", "content": "Begin."},)
    stage = chosen(tmp_path, ["done"], rows, system_prompt="Play.", input_template="{}!")
    rollouts, _ = stage.sample()
    assert "system\nPlay." in rollouts[0].prompt.text
    assert "user\nBegin.<" in rollouts[0].prompt.text
    # Nobody trains on nothing, and a misnamed column is no missing one.
    stage = chosen(tmp_path, ["done"], [{"environment": "told", "input": None}])
    with pytest.raises(RewardError, match="prompt 0: the row has no prompt, and reset gave none"):
        stage.sample()
    with pytest.raises(DataError, match=r"no column 'input'.*set --input_key question"):
        chosen(tmp_path, ["done"], [{"environment": "told", "question": "Why?"}])


def test_a_model_of_text_is_shown_no_images(tmp_path):
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: ") as refused:
        chosen(tmp_path, ["done"], [{"input": blocks, "environment": "told"}])
    assert "\n" not in str(refused.value)
