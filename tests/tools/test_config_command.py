"""`lightrft config` shows options."""

import tomllib

from lightrft.cli.main import main
from lightrft.cli.options import available_options


def output(capsys, *argv):
    code = main(["config", *argv])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_show_prints_what_a_run_would_take(capsys, tmp_path):
    (tmp_path / "a.toml").write_text("temperature = 0.5\ntop_k = 7\nreward_fn = ['gsm8k']\n")
    words = ["--config", str(tmp_path / "a.toml"), "--top-k", "3", "--no_verify_weight_sync"]
    words += ["--use_wandb", "hunter2", "--remote_rm_url", "http://me:hunter2@host/x"]
    text = output(capsys, "show", *words)
    assert "hunter2" not in text
    values = tomllib.loads(text)
    assert (values["temperature"], values["top_k"], values["reward_fn"]) == (0.5, 3, ["gsm8k"])
    assert values["verify_weight_sync"] is False
    assert "seed = 42\n" in text
    assert "top_k = 3  # changed\n" in text
    assert set(values) < set(available_options("config"))
    changed = tomllib.loads(output(capsys, "show", "--changed", *words))
    assert set(changed) == {
        "temperature",
        "top_k",
        "reward_fn",
        "verify_weight_sync",
        "remote_rm_url",
    }
    (tmp_path / "shown.toml").write_text(text)
    again = output(capsys, "show", "--config", str(tmp_path / "shown.toml"))
    assert tomllib.loads(again) == values


def test_show_refuses_what_a_run_would(capsys):
    assert main(["config", "show", "--temprature", "1", "--top_k", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
