"""Environments of the real verifiers, unchanged.

Harnesses install what they need by uv: they take a package index, and are not run by default.
"""

import json

import pytest
from benchmarks.peers.verifiers_cases import WORDS, resources, sums, write_words
from tests.machine import seconds
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.agents.test_agents import check_exact

from lightrft.config import ConfigError
from lightrft.datasets.files import read_rows
from lightrft.datasets.types import DataError
from lightrft.rewards.types import RewardError
from lightrft.rewards.worker import ReportedError
from lightrft.tools.agents.verifiers_agent import host

pytestmark = [pytest.mark.slow, pytest.mark.shard("verifiers"), pytest.mark.timeout(1200)]
pytest.importorskip("verifiers", reason="needs scripts/verifiers.txt")


@pytest.fixture
def stage(tmp_path):
    made = []

    def make(agent, rows, say, **options):
        options = {"agent_timeout_seconds": seconds(300), **options}
        made.append(AgentStage(tmp_path, agent, rows=rows, **options))
        played = made[-1]
        text = played.tokenizer.decode
        played.script = lambda request: say(text(request.prompt_token_ids))
        return played

    yield make
    for each in made:
        each.close()


def rows_of(source):
    return [dict(row.columns) for row in read_rows(source)]


@pytest.fixture(scope="module")
def wordle(tmp_path_factory):
    """A game of two words, won in two guesses at most."""
    with pytest.MonkeyPatch.context() as patch:
        # Read when NLTK is imported.
        patch.setenv("NLTK_DATA", str(write_words(tmp_path_factory.mktemp("nltk"))))
        pytest.importorskip("textarena", reason="needs scripts/verifiers.txt")
        yield "verifiers:textarena?taskset.game=Wordle-v0&player.harness.id=null"


def test_games_of_textarena(stage, wordle):
    def say(shown):
        return f"[{WORDS[shown.count('<|im_start|>assistant') - 1]}]"

    played = stage(wordle, rows_of(f"{wordle}&select.limit=4"), say)
    samples = played.sample()
    turns = [len(item.rollout.segments) for item in samples.scored]
    assert len(samples.scored) == 8
    assert {item.reward for item in samples.scored} == {1.0}
    assert set(turns) == {1, 2}
    assert len(check_exact(played, samples)) == sum(turns)
    second = samples.scored[turns.index(2)].rollout
    assert "You are Playing Wordle" in played.tokenizer.decode(second.completion.prompt_token_ids)
    assert f"[{WORDS[0]}]<|im_end|>\n<|im_start|>user\n" in played.text(second)


def test_tools_and_scores_of_nemo_gym(stage, tmp_path):
    def say(shown):
        if "<tool_response>" in shown.rpartition("What is")[2]:
            return "It is 42."
        return '<tool_call>\n{"name": "add", "arguments": {"x": 40, "y": 2}}\n</tool_call>'

    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, sums((40, 2), (40, 3)))))
    with resources() as address:
        environment = (
            f"verifiers:nemo_gym?taskset.dataset={data}&taskset.task.resources_url={address}"
            "&agent.harness.id=null"
        )
        played = stage(environment, rows_of(environment), say)
        samples = played.sample()
    assert [item.reward for item in samples.scored] == [1.0, 1.0, 0.0, 0.0]
    first = samples.scored[0]
    assert first.components == {"agent": 1.0, "nemo_gym": 1.0, "items": 3.0}
    assert len(check_exact(played, samples)) == 8
    assert "<tool_response>\n42" in played.text(first.rollout)


def test_servers_of_openenv(stage, openenv_server):
    environment = (
        f"verifiers:openenv?taskset.base_url=http://{openenv_server}&player.harness.id=null"
    )
    resets = '&taskset.resets=[{"target": 7}%2C {"target": 5}]'
    rows = rows_of(environment + resets)
    played = stage(environment, rows, lambda shown: "5" if "wrong" in shown else '{"number": 7}')
    samples = played.sample()
    assert [len(item.rollout.segments) for item in samples.scored] == [1, 1, 2, 2]
    assert [item.reward for item in samples.scored] == [1.0] * 4
    assert len(check_exact(played, samples)) == 6


@pytest.mark.parametrize(
    "agent, told",
    [
        ("verifiers:nowhere", "'nowhere' not found"),
        ("verifiers:json", "exports no Taskset"),
        ("verifiers:textarena?taskset.gam=x", "Extra inputs are not permitted"),
        (
            "verifiers:textarena?taskset.game=Wordle-v0",
            "the harness bash runs the model's programs",
        ),
        ("verifiers:openenv?taskset.env=x&select.limit=1", "select is for --prompt_data"),
        (
            "verifiers:nemo_gym?taskset.dataset=x&id=user-sim",
            "it has the roles .*: the model can play one",
        ),
    ],
)
def test_agents_that_are_refused(wordle, agent, told):
    with pytest.raises(ReportedError, match=told) as raised:
        host(agent.removeprefix("verifiers:"), "bubblewrap")
    assert "\n" not in str(raised.value)


def test_a_refused_agent_ends_the_start(stage):
    with pytest.raises(ConfigError, match=r"agent verifiers:nowhere: .* 'nowhere' not found"):
        stage("verifiers:nowhere", None, str)


@pytest.mark.parametrize(
    "source, told",
    [
        ("verifiers:nowhere", "'nowhere' not found"),
        ("verifiers:textarena?taskset.game=Wordle-v0", "infinite: limit it with select.limit=N"),
        ("verifiers:openenv?taskset.env=x&taskset.resets=[]", "it has no tasks"),
        ("verifiers:openenv?taskset=3", "give taskset.OPTION"),
        ("verifiers:?x=1", "expected verifiers:NAME"),
    ],
)
def test_sources_without_tasks_are_refused(wordle, source, told):
    with pytest.raises(DataError, match=told):
        rows_of(source)


def test_rows_of_other_data_are_refused(stage, wordle):
    with pytest.raises(RewardError, match="expected its data in the column verifiers"):
        stage(wordle, [{"input": "Find it."}], str).sample()


def test_the_runs_of_a_role_are_one_reward(stage, wordle):
    rows = rows_of(f"{wordle}&select.limit=1")
    agent = wordle.replace("player", "agent") + "&id=best-of-n&n=2"
    with pytest.raises(RewardError, match="ran its agent 2 times in one episode"):
        stage(agent, rows, lambda shown: "[crane]").sample()
