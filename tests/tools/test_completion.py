"""Completion is generated from the parsers, for every command and flag."""

import shutil
import subprocess

import pytest
from tests.machine import seconds

from lightrft.cli.main import COMMANDS, main
from lightrft.cli.options import available_options
from lightrft.tools.completion_command import SHELLS, whole_parser

COMPLETE = """
source {script}
COMP_WORDS=({words} "{last}")
COMP_CWORD={index}
COMP_LINE="{words} {last}"
COMP_POINT=${{#COMP_LINE}}
_shtab_lightrft
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(capsys, shell):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def complete(capsys, tmp_path):
    (tmp_path / "script").write_text(script(capsys, "bash"))

    def run(words, last):
        code = COMPLETE.format(
            script=tmp_path / "script", words=words, last=last, index=len(words.split())
        )
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, timeout=seconds(60), check=True
        )
        return set(done.stdout.split())

    return run


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_commands_flags_and_values(complete):
    assert complete("lightrft", "tr") == {"train"}
    assert complete("lightrft", "co") == {"config", "completion"}
    assert complete("lightrft train", "--temp") == {"--temperature"}
    assert complete("lightrft train --zero_stage", "") >= {"0", "1", "2", "3"}
    assert "group_norm" in complete("lightrft train --advantage_estimator", "gr")
    assert complete("lightrft sft", "--train_o") >= {"--train_on"}
    assert complete("lightrft config", "sh") == {"show"}
    assert "--changed" in complete("lightrft config show", "--ch")


@pytest.mark.parametrize("shell", SHELLS)
def test_no_command_and_no_flag_is_missing(capsys, shell):
    text = script(capsys, shell)
    for name in COMMANDS:
        assert name in text
    for name in available_options():
        assert name in text
    if shutil.which(shell) is not None:
        done = subprocess.run(
            [shell, "-n"], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_every_command_has_a_parser():
    parser = whole_parser(COMMANDS)
    (commands,) = [action for action in parser._actions if action.choices]
    assert set(commands.choices) == set(COMMANDS)
