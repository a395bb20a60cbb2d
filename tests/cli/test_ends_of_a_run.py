"""What `lightrft train` says at its end: where the model is, and what the same command will do."""

import shlex

import pytest

from lightrft.cli.errors import describe, exit_code_of
from lightrft.cli.main import COMMANDS
from lightrft.cli.train import interruption_explained, next_commands
from lightrft.config import TrainConfig
from lightrft.strategy.checkpoints.manifest import MANIFEST_NAME


def interrupted(folder, **options):
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        interruption_explained(TrainConfig(output_dir=str(folder), **options)),
    ):
        raise KeyboardInterrupt
    assert exit_code_of(caught.value) == 130
    return describe(caught.value)


def test_an_interruption_says_that_the_same_command_continues_and_from_where(tmp_path):
    for step in (9, 10):
        saved = tmp_path / "checkpoints/_actor" / f"global_step{step}"
        saved.mkdir(parents=True)
        (saved / MANIFEST_NAME).write_text("{}")
    assert interrupted(tmp_path) == "interrupted: the same command continues after step 10"


def test_without_a_checkpoint_it_says_that_the_same_command_starts_over(tmp_path):
    text = interrupted(tmp_path / "never")
    assert text.startswith("interrupted: the same command starts over")
    assert "--save_steps" in text


def test_other_errors_pass_through(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        interruption_explained(TrainConfig(output_dir=str(tmp_path))),
    ):
        raise ZeroDivisionError


def test_the_next_commands_exist_and_are_three(tmp_path):
    first, *rest = next_commands("runs/my run", "runs/my run/model").splitlines()
    assert first.split(maxsplit=1) == ["model", "runs/my run/model"]
    commands = [shlex.split(line.removeprefix("next").strip()) for line in rest]
    assert len(commands) == 3
    for words in commands:
        assert words[0] == "lightrft"
        assert words[1] in COMMANDS
        assert words[2] == "runs/my run"
