"""`lightrft serve-reward` answers, and ends when it is interrupted."""

import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from tests.rewards.asking import results_of

from lightrft.cli.errors import UsageError
from lightrft.tools.rewards.remote import RemoteReward
from lightrft.tools.rewards.serve_reward_command import build_parser, run


def test_a_reward_file_is_served_until_it_is_interrupted(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "def same(responses, labels):\n"
        "    return [float(r == a) for r, a in zip(responses, labels, strict=True)]\n"
    )
    arguments = ["serve-reward", "--reward_fn", f"{file}:same", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightrft.cli.main", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        # Tests started in the background of a shell inherit that interrupts are ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        found = re.search(r"serving same at (http://\S+)", process.stdout.readline())
        reward = RemoteReward(found.group(1), timeout_seconds=30)
        results = results_of(reward, ["4", "5"], ["4", "4"])
        assert [(r.reward, r.components["same"]) for r in results] == [(1.0, 1.0), (0.0, 0.0)]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(30)
        process.stdout.close()
    assert code == 130


@pytest.mark.parametrize(
    "arguments", [[], ["--reward_fn"], ["--reward_fn", "gsm8k", "--port", "x"]]
)
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(UsageError, match="serve-reward --help"):
        build_parser().parse_args(arguments)


@pytest.mark.parametrize("place", [["--port", "70000"], ["--host", "999.1.1.1"]])
def test_an_address_where_nobody_can_listen_is_named(place):
    with pytest.raises(
        UsageError, match=rf"{' '.join(place)}.*expected an address of this machine"
    ):
        run(["--reward_fn", "gsm8k", *place])
