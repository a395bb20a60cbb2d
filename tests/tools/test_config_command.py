"""`lightrft config` shows, compares and describes options."""

import json
import tomllib

import pytest
from pydantic import TypeAdapter, ValidationError

from lightrft.cli.main import main
from lightrft.cli.options import available_options
from lightrft.config import TrainConfig


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


def test_diff_of_files_and_runs(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    TrainConfig(seed=1, max_steps=3).save(tmp_path / "run" / "config.toml")
    (tmp_path / "b.toml").write_text("seed = 2\n")
    text = output(capsys, "diff", str(tmp_path / "run"), str(tmp_path / "b.toml"))
    assert text.splitlines() == ["seed: 1 -> 2", "max_steps: 3 -> None"]
    same = output(capsys, "diff", str(tmp_path / "run"), str(tmp_path / "run"))
    assert same == "no option differs\n"


def test_the_schema_has_every_option_with_its_type_bounds_and_choices(capsys):
    schema = json.loads(output(capsys, "schema"))
    assert set(schema["properties"]) == set(available_options("config"))
    assert schema["additionalProperties"] is False
    stage = schema["properties"]["zero_stage"]
    assert (stage["type"], stage["enum"], stage["default"]) == ("integer", [0, 1, 2, 3], 2)
    assert schema["properties"]["gamma"]["minimum"] == 0
    assert schema["properties"]["gamma"]["maximum"] == 1
    assert schema["properties"]["temperature"]["minimum"] == 1e-5
    assert schema["properties"]["top_p"]["exclusiveMinimum"] == 0
    assert all(entry["description"] for entry in schema["properties"].values())


@pytest.mark.parametrize("values", [{"seed": "x"}, {"temperature": "hot"}, {"reward_fn": 3}])
def test_pydantic_and_the_options_refuse_the_same(values):
    with pytest.raises(ValidationError):
        TypeAdapter(TrainConfig).validate_python(values)
    with pytest.raises(ValueError, match=next(iter(values))):
        TrainConfig.from_args(values)
