"""Agents that are programs: in the sandbox, with the endpoint as their only network."""

import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest
from tests.machine import seconds, wait_until
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.agents.test_agents import Paying, check_exact

from lightrft.config import ConfigError
from lightrft.rewards.build import CombinedReward
from lightrft.rewards.types import RewardError

PROGRAM = Path(__file__).with_name("program_of_agent.py")
COMMAND = f"python3 {PROGRAM} {{base_url}} {{row}}"


@pytest.fixture
def stage(tmp_path):
    made = []

    def make(command=COMMAND, *, row=(), **keywords):
        rows = [{"input": "Find it.", "target": 7, **dict(row)}]
        keywords = {"agent_timeout_seconds": seconds(60), "rows": rows, **keywords}
        made.append(AgentStage(tmp_path, None, agent_command=command, **keywords))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.full
def test_what_a_program_was_answered_is_trained_with_the_reward_that_it_prints(stage):
    played = stage(row={"turns": 3})
    samples = played.sample()
    assert len(check_exact(played, samples)) == 6
    for item in samples.scored:
        words = item.rollout.response_text.split("\n")
        assert len(words) == 3
        assert item.reward == len(words[0]) / 100
        assert "<|im_start|>user\nAnd 7?<|im_end|>" in played.text(item.rollout)


@pytest.mark.full
def test_more_programs_run_at_once_than_a_process_may_open_files_for_by_default(stage):
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        played = stage(rows=[{"input": f"Find {i}.", "target": i} for i in range(20)])
        assert len(check_exact(played, played.sample())) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, most))


@contextlib.contextmanager
def listeners(tmp_path):
    """What a program might reach of this machine."""
    name = f"lightrft-agent-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        port = tcp.getsockname()[1]
        yield {"then": "look", "port": port, "name": name, "file": str(Path(__file__))}


@pytest.mark.full
def test_no_other_network_and_no_other_file_is_reached(stage, tmp_path):
    nothing = {"tcp": 0.0, "unix": 0.0, "links": 0.0, "files": 0.0}
    with listeners(tmp_path) as row:
        item = stage(row=row).sample().scored[0]
        assert {name: item.components[name] for name in nothing} == nothing
        # Where nothing stands in its way, the same program reaches both.
        item = stage(COMMAND, row=row, sandbox="unsafe").sample().scored[0]
        assert item.components["tcp"] == item.components["unix"] == 1.0


def processes_of(word):
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and word in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


@pytest.mark.full
def test_a_program_is_ended_at_its_deadline_with_what_it_started(stage):
    played = stage(
        f"{COMMAND} of-this-test",
        row={"then": "stay"},
        agent_timeout_seconds=seconds(4),
        reward_failure="mask",
    )
    assert played.sample().table.is_masked.all()
    assert wait_until(lambda: not processes_of(b"of-this-test"), 10)
    assert wait_until(lambda: not processes_of(b"sleep(1000)"), 10)


@pytest.mark.full
@pytest.mark.parametrize(
    "then, told",
    [
        ("fail", "the program ended with exit code 1: it went wrong"),
        ("flood", "the program printed more than 16777216 bytes"),
        ("chat", "the last line that the program printed is no reward: .* got 'I have done it.'"),
    ],
)
def test_how_an_episode_fails(stage, then, told):
    with pytest.raises(RewardError, match=f"the agent failed for prompt 0: {told}"):
        stage(row={"then": then}).sample()


@pytest.mark.full
def test_a_program_that_has_closed_its_sending_side_gets_its_answer(stage):
    played = stage(row={"then": "close"})
    samples = played.sample()
    assert len(check_exact(played, samples)) == 4
    assert {item.reward for item in samples.scored} == {1.0}


@pytest.mark.full
def test_where_a_reward_function_pays_the_output_is_not_read(stage):
    played = stage(row={"then": "chat"}, reward_fn=("gsm8k",), label_key="target")
    played.reward = CombinedReward((Paying(),), (1.0,))
    assert [dict(item.components) for item in played.sample().scored] == [{"paid": 0.75}] * 2


@pytest.mark.cover(3)
@pytest.mark.parametrize(
    "command, told",
    [
        ("", "got '', expected 'PROGRAM"),
        ("python3 agent.py {base_url}", r"expected 'PROGRAM \{base_url\} \{row\}'"),
        ("python3 'agent.py {row}", "words cannot be told apart: No closing quotation"),
        ("no-such-program {base_url} {row}", "the sandbox has no program no-such-program"),
        ("python3 / {row}", "it names /"),
        ("ls /proc {row}", "it names /proc, which a sandbox has of its own"),
    ],
)
def test_commands_that_cannot_run_are_refused_at_the_start(stage, command, told):
    with pytest.raises(ConfigError, match=f"agent_command.*{told}"):
        stage(command)
