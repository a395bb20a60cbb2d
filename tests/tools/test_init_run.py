"""`lightrft init-run` writes the folder of a run that trains as it is."""

import json
import tomllib

import pytest

from lightrft.cli.main import main
from lightrft.cli.options import available_options
from lightrft.config import TrainConfig
from lightrft.tools.init_run_command import options_of_folder, options_text


@pytest.mark.full
def test_what_it_writes_trains_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init-run", "first"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: lightrft ")
    assert command == "train --config first/run.toml"
    assert main([*command.split(), "--max_steps", "1", "--heartbeat_seconds", "600"]) == 0
    steps = (tmp_path / "first/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["step"] == 1
    assert main(["init-run", "first"]) == 2
    assert "first is not empty" in capsys.readouterr().err


def test_its_prompts_and_its_reward_pass_the_check_of_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init-run", "first", "--pretrain", "owner/model"]) == 0
    assert not (tmp_path / "first/model").exists()
    reward = "first/reward.py:reward"
    assert main(["data", "check", "first/prompts.jsonl", "--reward_fn", reward]) == 0
    assert "64" in capsys.readouterr().out


@pytest.mark.parametrize("pretrain", [None, "owner/model"])
def test_every_option_of_the_file_is_one_and_has_its_help(tmp_path, pretrain):
    options = options_of_folder(tmp_path, pretrain)
    text = options_text(options, tmp_path)
    set_here = tomllib.loads(text)
    assert set(set_here) == set(options)
    assert set_here["pretrain"] == (pretrain or str(tmp_path / "model"))
    usual = [name for name, info in available_options().items() if info.common]
    below = [name for name in usual if f"\n# {name} " in text]
    assert set(usual) == set(below) | set(options) & set(usual)
    # All marks removed, it still is a file of options, with the same values.
    bare = text.splitlines()
    marked = [line[2:] for line in bare if line[2:].partition(" = ")[0] in below and " = " in line]
    (tmp_path / "all.toml").write_text("\n".join([*bare, *marked]))
    (tmp_path / "as_it_is.toml").write_text(text)
    assert TrainConfig.load(tmp_path / "all.toml") == TrainConfig.load(tmp_path / "as_it_is.toml")
    assert len(marked) > 8
