"""Tasks in Harbor's folders: programs work in them, and their tests pay."""

import io
import re
import tarfile
from pathlib import Path

import pytest
from tests.datasets.chat_families import family_tokenizer
from tests.machine import seconds
from tests.rollout.agents.agent_stage import AgentStage
from tests.rollout.agents.test_agents import check_exact

from lightrft.config import TrainConfig
from lightrft.datasets import load_prompts
from lightrft.datasets.files import local_files, read_rows
from lightrft.datasets.types import DataError
from lightrft.rewards.types import RewardError
from lightrft.tools.agents.harbor_agent import UNPACK
from lightrft.tools.agents.harbor_tasks import read_task

COMMAND = f"python3 {Path(__file__).with_name('program_of_tasks.py')} {{base_url}} {{row}}"
DOCKERFILE = "FROM python:3.12-slim\n# Where it works.\nWORKDIR /app\nCOPY data/ data/\nENV A=7\n"
CHECKS = """#!/bin/bash
if [ "$(cat answer.txt)" = "$(cat /tests/expected.txt)" ]; then r=1; else r=0; fi
echo $r > /logs/verifier/reward.txt
"""


def write_task(folder, *, toml="", docker=DOCKERFILE, tests=CHECKS):
    """A task in which the word of a file is to be written into another one."""
    files = {
        "instruction.md": "Write the word of data/word.txt into answer.txt.",
        "task.toml": f'schema_version = "1.4"\n[metadata]\nauthor = "me"\n{toml}',
        "environment/Dockerfile": docker,
        "environment/data/word.txt": "plum\n",
        "tests/test.sh": tests,
        "tests/expected.txt": "plum\n",
    }
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def play(tmp_path):
    made = []

    def make(said, *, task=(), **options):
        write_task(tmp_path / "tasks" / "words", **dict(task))
        rows = [dict(row.columns) for row in read_rows(f"harbor:{tmp_path / 'tasks'}")]
        options = {"agent_timeout_seconds": seconds(60), **options}
        played = AgentStage(tmp_path, None, agent_command=COMMAND, rows=rows, **options)
        made.append(played)
        played.script = lambda request: said
        return played

    yield make
    for each in made:
        each.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "said, reward", [("cp data/word.txt answer.txt", 1.0), ("echo $A > answer.txt", 0.0)]
)
def test_the_tests_pay_for_what_a_program_left(play, said, reward):
    played = play(said)
    samples = played.sample()
    assert [dict(item.components) for item in samples.scored] == [{"agent": reward}] * 2
    assert len(check_exact(played, samples)) == 2
    prompt = samples.scored[0].rollout.completion.prompt_token_ids
    assert "Write the word of data/word.txt" in played.tokenizer.decode(prompt)


@pytest.mark.full
def test_rewards_with_names(play):
    parts = 'echo \'{"reward": 0.5, "words": 2}\' > /logs/verifier/reward.json'
    tests = f"echo 1 > /logs/verifier/reward.txt\n{parts}\nexit 1\n"
    item = play("true", task={"tests": tests}).sample().scored[0]
    assert dict(item.components) == {"agent": 0.5, "words": 2.0}


SEES = """
cd /app
for name in tests logs/verifier; do [ -e /$name ] && touch answer.txt; done
echo bad > $HOME/planted
ln -s /logs/verifier x
(sleep 1; echo plum > answer.txt) &
mkfifo pipe
exit 0
"""
CLEAN = CHECKS.replace(
    "if ", '[ -e "$HOME/planted" ] && exit\nsleep 2\n[ -e answer.txt ] && exit\nif ', 1
).replace("#!", "", 1)


@pytest.mark.full
def test_programs_reach_neither_the_tests_nor_their_sandbox(play):
    tests = CLEAN.replace("$r >", "$((r + 3)) >")
    assert [item.reward for item in play(SEES, task={"tests": tests}).sample().scored] == [3.0] * 2


def test_an_archive_of_a_program_writes_into_its_folders_alone(tmp_path):
    """What it writes to the output of what started it is an archive like any other."""
    app, tests = tmp_path / "app", tmp_path / "tests"
    tests.mkdir()
    data, archive = b"forged", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, link in (
            ("app/file", tarfile.REGTYPE, ""),
            ("app/x", tarfile.SYMTYPE, f"{tests}/json.py"),
            ("app/x", tarfile.REGTYPE, ""),
            ("app/up", tarfile.SYMTYPE, str(tests)),
            ("app/up/json.py", tarfile.REGTYPE, ""),
            ("app/../tests/json.py", tarfile.REGTYPE, ""),
            ("tests/json.py", tarfile.REGTYPE, ""),
            ("app/pipe", tarfile.FIFOTYPE, ""),
        ):
            entry = tarfile.TarInfo(f"{str(tmp_path).lstrip('/')}/{name}")
            entry.type, entry.linkname = kind, link
            entry.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(data))
    found = {}
    exec(UNPACK, found)
    found["unpack"](archive.getvalue(), [str(app)])
    assert list(tests.iterdir()) == []
    assert sorted(path.name for path in app.iterdir()) == ["file", "up", "x"]
    assert (app / "file").read_bytes() == data


@pytest.mark.full
def test_files_that_a_program_closed_are_tested(play):
    said = "cp data/word.txt answer.txt; chmod 000 answer.txt data/word.txt data"
    assert play(said).sample().scored[0].reward == 1.0


@pytest.mark.full
def test_what_a_program_left_at_its_time_limit_is_tested(play):
    said = "cp data/word.txt answer.txt; sleep 1000"
    task = {"toml": f"[agent]\ntimeout_sec = {seconds(5)}\n[environment]\ncpus = 1\n"}
    assert play(said, task=task).sample().scored[0].reward == 1.0


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "said, task, told",
    [
        ("exit 3", {}, "the program ended with exit code 3"),
        ("true", {"tests": "true"}, "the tests wrote no reward.txt"),
        ("true", {"tests": "echo x > /logs/verifier/reward.txt"}, r"number.*, got 'x\\n'"),
        (
            "true",
            {"tests": "sleep 1000", "toml": "[verifier]\ntimeout_sec = 2\n"},
            "the tests did not end within 2 s",
        ),
    ],
)
def test_how_a_task_fails(play, said, task, told):
    with pytest.raises(RewardError, match=f"the agent failed for prompt 0: .*{told}"):
        play(said, task=task).sample()


def test_tasks_need_a_sandbox(play):
    with pytest.raises(RewardError, match="expected --sandbox bubblewrap"):
        play("true", sandbox="unsafe").sample()


@pytest.mark.parametrize(
    "task, told",
    [
        ({"docker": "FROM ubuntu\nWORKDIR /app\nRUN make\n"}, "'RUN make' is not supported"),
        ({"docker": "FROM node:20\nWORKDIR /app\n"}, "the image node is not to be had"),
        ({"docker": "FROM ubuntu\n"}, "it has no working directory"),
        ({"docker": "FROM ubuntu\nWORKDIR /usr/x\n"}, "/usr/x lies in a folder that the sandbox"),
        ({"docker": "FROM ubuntu\nWORKDIR /a\nCOPY ../x .\n"}, r"COPY \.\./x: there is no such"),
        ({"docker": "FROM ubuntu\nWORKDIR /a\nCOPY --from=b x .\n"}, "'COPY --from=b x .' is not"),
        ({"docker": "FROM ubuntu AS a\nWORKDIR /a\n"}, "'FROM ubuntu AS a' is not supported"),
        ({"docker": "FROM ubuntu\nWORKDIR /a\nENV A='b\n"}, "No closing quotation"),
        ({"docker": f"FROM ubuntu\nWORKDIR /a\nENV {40 * 'a=a '}b\n"}, "expected NAME=VALUE"),
        ({"docker": "FROM ubuntu\nWORKDIR /a\nENV PATH=/a/bin\n"}, "PATH cannot be set"),
        (
            {"docker": "FROM ubuntu\nWORKDIR /a\nCOPY data/word.txt /a\n"},
            "/a is a file of COPY and a folder",
        ),
        ({"toml": '[environment]\ndocker_image = "x"\n'}, r"environment\.docker_image is not"),
        ({"toml": "[environment]\nallow_internet = true\n"}, r"environment\.allow_internet"),
        ({"toml": '[environment.env]\nA = "${A}"\n'}, r"environment\.env\.A: expected a text"),
        ({"toml": '[verifier]\nenvironment_mode = "separate"\n'}, r"verifier\.environment_mode"),
        ({"toml": "[agent]\ntimeout_sec = -1\n"}, r"agent\.timeout_sec: expected seconds"),
        ({"toml": '[[steps]]\nname = "a"\n'}, "steps is not supported"),
        ({"toml": "[agent"}, "Expected"),
        ({"tests": "pip install pytest\n"}, r"tests/test\.sh calls pip: tests have no network"),
        ({"tests": None}, r"it has no tests/test\.sh"),
    ],
)
def test_tasks_that_need_more_are_left_out_by_name(tmp_path, task, told):
    write_task(tmp_path / "words", **task)
    with pytest.raises(DataError, match=f"left out 1 of 1 rows: task words: .*{told}.*none is"):
        read_rows(f"harbor:{tmp_path}")
    write_task(tmp_path / "good")
    (row,) = read_rows(f"harbor:{tmp_path}")
    assert row.columns["task"] == "good"
    assert re.match(f"left out 1 of 2 rows: task words: .*{told}", row.remark)


def test_what_is_left_out_is_said_once_and_counted(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "other")
    for number in range(5):
        write_task(tmp_path / f"bad{number}", docker="FROM node\n")
    config = TrainConfig(input_key="input")
    found = load_prompts(f"harbor:{tmp_path}", family_tokenizer("Qwen2.5"), config)
    assert [prompt.columns["task"] for prompt in found] == ["good", "other"]
    first, line = found.report.summary().splitlines()
    assert ": 2 prompts of" in first
    named = "; ".join(f"task bad{number}: [^;]+ in whose place [^;]+" for number in range(3))
    assert re.search(f"left out 5 of 7 rows: {named}; and 2 more, which `lightrft data", line)


def test_files_of_an_image_are_bounded_and_none_is_left_out(tmp_path):
    folder = write_task(tmp_path, docker="FROM ubuntu\nWORKDIR /a\nCOPY large .\n")
    with (folder / "environment" / "large").open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(DataError, match="environment has more than 33554432 bytes"):
        read_task(folder)
    (folder / "environment" / "large").write_text("")
    (folder / "environment" / "alias").symlink_to("large")
    write_task(tmp_path, docker="FROM ubuntu\nWORKDIR /a\nCOPY alias /b/\n")
    assert [str(where) for _, where in read_task(folder).copies] == ["/b/alias"]
    (folder / "environment" / ".dockerignore").write_text("large")
    with pytest.raises(DataError, match="dockerignore is not supported"):
        read_task(folder)


def test_a_program_has_no_place_in_a_folder_of_the_task(play):
    # The program lies beside this file: under /tmp, say, the task itself is refused.
    docker = f"FROM ubuntu\nWORKDIR /{Path(__file__).parts[1]}/elsewhere\n"
    said = r"agent_command names .*: expected it elsewhere|lies in a folder that the sandbox has"
    with pytest.raises((RewardError, DataError), match=said):
        play("true", task={"docker": docker}).sample()


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"found no task\.toml"):
        read_rows(f"harbor:{tmp_path}")


def test_what_says_what_holds_is_taken(tmp_path):
    toml = (
        '[environment]\nnetwork_mode = "no-network"\nos = "linux"\nmemory_mb = 2048\ngpus = 0\n'
        'workdir = "/work/x"\nmcp_servers = []\n[verifier]\nenv = { B = "b" }\n'
    )
    docker = 'FROM debian:12\nWORKDIR /a\nWORKDIR b\nCOPY data/word.txt \\\n  w.txt\nCMD ["x"]\n'
    docker += "LABEL by=O'Neil\n"
    task = read_task(write_task(tmp_path, toml=toml, docker=docker))
    assert str(task.workdir) == "/work/x"
    assert [str(where) for _, where in task.copies] == ["/a/b/w.txt"]
    assert task.folders == ["/a", "/work"]
    assert (task.test_variables, task.test_seconds) == ({"B": "b"}, 600.0)


def test_a_run_knows_the_files_of_its_tasks(tmp_path):
    write_task(tmp_path / "words")
    found = [path.name for path in local_files(f"harbor:{tmp_path}", "train")]
    assert sorted(found) == sorted(
        ["Dockerfile", "word.txt", "instruction.md", "task.toml", "expected.txt", "test.sh"]
    )
