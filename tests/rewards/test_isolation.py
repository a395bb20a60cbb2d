"""What a reward function leaves behind, holds, sees and prints."""

import signal
import time
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.programs import run_python
from tests.rewards.asking import results_of

from lightrft.cli.errors import is_out_of_memory
from lightrft.config import TrainConfig
from lightrft.rewards import RewardError, build_reward
from lightrft.rewards.process import names_a_secret, worker_environment

SOURCE = """
import os, subprocess, sys, time

DAEMON = '''
import os, sys, time
if sys.argv[2] == "twice" and os.fork():
    sys.exit()
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(300)
'''

def leaves(responses, how, file):
    subprocess.Popen([sys.executable, "-c", DAEMON, file[0], how[0]])
    while not os.path.exists(file[0]) or not open(file[0]).read():
        time.sleep(0.01)
    if how[0] == "hang":
        while True: pass
    if how[0] == "exit":
        os._exit(3)
    return [0.0] * len(responses)

def holds(responses):
    blocks = []
    while len(blocks) < 90:
        blocks.append(bytearray(10_000_000))
        time.sleep(0.02)
    return [1.0] * len(responses)

def holds_in_children(responses):
    program = "import time; x = bytearray(150_000_000); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    for child in children: child.wait()
    return [1.0] * len(responses)

def sees(responses, *, name):
    return [float(name in os.environ) for _ in responses]

def prints(responses):
    for i in range(3000): print("line", i)
    sys.stderr.write("no end of line")
    return [1.0] * len(responses)

def floods(responses):
    while True: sys.stdout.write("x" * 100_000)

def escapes(responses):
    print("\\x1b]0;owned\\x07 \\x1b[2J\\rhidden")
    raise ValueError("\\x1b[31mred\\u202e")

def exhausts(responses): raise RuntimeError("CUDA out of memory")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(SOURCE)
    return path


def score(file, name, columns=None, **options):
    config = TrainConfig(**options)
    with build_reward([f"{file}:{name}"], config=config) as reward:
        columns = {key: [value] for key, value in (columns or {}).items()}
        return results_of(reward, ["a"], **columns)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for_end(pid):
    deadline = time.monotonic() + seconds(20)
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.mark.parametrize("how", ["once", "twice", "hang", "exit"])
def test_a_child_with_a_session_of_its_own_ends_with_its_reward(file, tmp_path, how):
    columns = {"how": how, "file": str(tmp_path / "pid")}
    if how in ("hang", "exit"):
        with pytest.raises(RewardError, match=r"did not return|exit code 3"):
            score(file, "leaves", columns, reward_timeout_seconds=5.0)
    else:
        assert score(file, "leaves", columns)[0].reward == 0.0
    assert wait_for_end(int((tmp_path / "pid").read_text()))


def test_no_child_outlives_a_killed_trainer(file, tmp_path):
    """Neither its busy worker, nor what that started."""
    program = (
        "import os, signal, threading, time\n"
        "from pathlib import Path\n"
        "from lightrft.rewards import build_reward\n"
        f"reward = build_reward([{str(file) + ':leaves'!r}])\n"
        f"file = Path({str(tmp_path / 'pid')!r})\n"
        "columns = {'how': ['hang'], 'file': [str(file)]}\n"
        "call = lambda: reward.score(['p'], ['a'], [None], columns)\n"
        "threading.Thread(target=call, daemon=True).start()\n"
        "while not file.exists() or not file.read_text():\n"
        "    time.sleep(0.01)\n"
        "print(reward.functions[0].workers.workers[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_python("-c", program)
    assert done.returncode == -signal.SIGKILL
    assert wait_for_end(int(done.stdout))
    assert wait_for_end(int((tmp_path / "pid").read_text()))


@pytest.mark.full
@pytest.mark.parametrize("name", ["holds", "holds_in_children"])
def test_memory_of_a_reward_and_its_children_is_bounded(file, name):
    with pytest.raises(
        RewardError, match=r"more than the 0.3 GB that --reward_memory_gb"
    ) as caught:
        score(file, name, reward_memory_gb=0.3)
    assert not is_out_of_memory(caught.value)  # exit code 5: no remedy of the trainer helps


def test_a_rewards_lack_of_memory_is_not_the_trainers(file):
    with pytest.raises(RewardError, match="CUDA out of memory") as caught:
        score(file, "exhausts")
    assert not is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("CUDA out of memory"))


@pytest.mark.full
def test_workers_do_not_inherit_secrets_unless_told(file, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("SOME_SETTING", "1")

    def sees(variable, **options):
        return score(file, "sees", reward_args={"name": variable}, **options)[0].reward

    assert sees("WANDB_API_KEY") == 0.0
    assert sees("SOME_SETTING") == 1.0
    assert sees("WANDB_API_KEY", reward_env=("WANDB_API_KEY",)) == 1.0


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "GITHUB_PAT",
        "DB_PASSWORD",
        "PGPASSWORD",
        "MYTOKEN",
        "SSH_AUTH_SOCK",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "LIGHTRFT_REWARD_TOKEN",
        "WANDB_APIKEY2",
    ],
)
def test_secrets_are_known_by_name(name):
    assert names_a_secret(name)
    assert worker_environment(source={name: "x"}) == {}
    assert worker_environment((name,), source={name: "x"}) == {name: "x"}


def test_other_variables_pass_except_for_addresses_with_passwords():
    kept = {
        "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HOME": "/x",
        "LD_LIBRARY_PATH": "/a",
        "http_proxy": "http://proxy:1",
    }
    assert worker_environment(source=kept | {"https_proxy": "http://me:pw@proxy:1"}) == kept


def test_three_thousand_printed_lines_are_summarised(file, capfd):
    score(file, "prints")
    lines = capfd.readouterr().err.splitlines()
    assert lines[:20] == [f"line {i}" for i in range(20)]
    assert lines[20:] == [f"reward {file}:prints printed 2981 more lines, which are not shown"]


def test_a_flood_without_line_ends_holds_neither_memory_nor_the_deadline(file, capfd):
    start = time.monotonic()
    with pytest.raises(RewardError, match="did not return within 1 s"):
        score(file, "floods", reward_timeout_seconds=1.0)
    assert time.monotonic() - start < seconds(30)
    assert len(capfd.readouterr().err) < 2_000


def test_no_terminal_escape_of_a_reward_reaches_the_console(file, capfd):
    from lightrft.cli.errors import ExitCode, run_guarded

    assert run_guarded("lightrft", lambda: score(file, "escapes")) == ExitCode.REWARD
    shown = capfd.readouterr().err
    assert "\\x1b]0;owned\\x07 \\x1b[2J\\x0dhidden" in shown
    assert "\\x1b[31mred\\u202e" in shown
    assert all(character.isprintable() or character in "\n\t" for character in shown)
