"""A user's mistake costs one clear line and the promised code, before any model is built."""

from __future__ import annotations

import json

import pytest

from lightrft.cli import train as train_command
from lightrft.cli.main import main

GOOD_ROWS = [{"input": f"{n}+1?", "label": str(n + 1)} for n in range(4)]

ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE", "LIGHTRFT_LAUNCHED",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model, data and a reward; a run in it would be an error."""
    monkeypatch.chdir(tmp_path)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that what a run sets is undone afterwards
        monkeypatch.delenv(name)

    def refuse(config, stop_request):
        raise AssertionError("a run was started")

    monkeypatch.setattr(train_command, "train", refuse)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    write(tmp_path / "good.jsonl", *GOOD_ROWS)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("{}")
    (tmp_path / "reward.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")
    return tmp_path


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train(**changes):
    """Exit code of `lightrft train` with good options except for the changes; None drops one."""
    options = {
        "pretrain": "model",
        "prompt_data": "good.jsonl",
        "reward_fn": "reward.py:f",
        "rollout_batch_size": "16",
        **changes,
    }
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return main(["train", *(word for pair in given for word in pair)])


def test_good_input_reaches_the_run(folder, capsys):
    assert train() == 1
    assert "a run was started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pretrain": None}, ["--pretrain is missing", "init-model"]),
        ({"prompt_data": None}, ["--prompt_data is missing"]),
        ({"reward_fn": None}, ["--reward_fn is missing", "boxed_math"]),
        ({"pretrain": "nowhere"}, ["--pretrain", "nowhere"]),
        ({"pretrain": "/no/where"}, ["--pretrain", "/no/where"]),
        ({"critic_pretrain": "nowhere", "advantage_estimator": "gae"}, ["--critic_pretrain"]),
        ({"foo": "1"}, ["unknown option 'foo'"]),
        ({"rollout_batchsize": "1"}, ["rollout_batchsize", "did you mean rollout_batch_size"]),
        ({"use_wandb": "key"}, ["use_wandb is not available", "metrics.jsonl"]),
        ({"load_in_4bit": "True"}, ["load_in_4bit is not available", "quantised"]),
        ({"advantage_estimator": "grpoo"}, ["advantage_estimator", "'grpoo'", "'grpo'"]),
        ({"engine_type": "vlm"}, ["engine_type", "'vlm'", "did you mean 'vllm'"]),
        ({"policy_loss": "pp"}, ["policy_loss", "'pp'", "'ppo'"]),
        (
            {"rollout_batch_size": "10"},
            ["10 * 8 = 80", "128", "train_batch_size: 80", "rollout_batch_size: 16"],
        ),
        ({"micro_train_batch_size": "3"}, ["128", "3 * 1 = 3", "126 or 129"]),
        ({"rollout_batch_size": "-16"}, ["rollout_batch_size", "-16", ">= 1"]),
        ({"train_batch_size": "0"}, ["train_batch_size", "0", ">= 1"]),
        ({"generate_max_len": "-1"}, ["generate_max_len", "-1"]),
        ({"max_steps": "1.5"}, ["max_steps", "'1.5'"]),
        ({"temperature": "0"}, ["temperature", "> 0"]),
        ({"n_samples_per_prompt": "1", "train_batch_size": "16"}, ["n_samples_per_prompt >= 2"]),
        ({"nproc_per_node": "0"}, ["--nproc_per_node", "'0'", "1"]),
        (
            {"nproc_per_node": "3", "n_samples_per_prompt": "3", "train_batch_size": "24"},
            ["rollout_batch_size", "3 processes", "15 or 18"],
        ),
        ({"nproc_per_node": "2", "engine_tp_size": "4"}, ["engine_tp_size", "4 and 2"]),
        ({"config": "none.toml"}, ["none.toml"]),
        ({"system_prompt": "x"}, ["system_prompt", "apply_chat_template"]),
        ({"input_template": "x"}, ["input_template", "{}"]),
    ],
)
def test_usage_errors(folder, capsys, changes, expected):
    assert train(**changes) == 2
    assert_clear(capsys.readouterr().err, expected)


def test_a_model_without_tokenizer_is_named(folder, capsys):
    (folder / "model" / "tokenizer.json").unlink()
    assert train() == 2
    assert_clear(capsys.readouterr().err, ["no tokenizer", "model", "tokenizer.json"])


def test_a_model_without_weights_is_named(folder, capsys):
    (folder / "model" / "model.safetensors").unlink()
    assert train() == 2
    assert_clear(capsys.readouterr().err, ["no weights", "safetensors"])


@pytest.mark.parametrize("flag", ["prompt_data", "eval_data"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.jsonl", None, ["none.jsonl", "does not exist"]),
        ("broken.jsonl", b'{"input": "a"}\n{"input": \n', ["broken.jsonl:2", "JSON"]),
        ("list.jsonl", b"[1]\n", ["list.jsonl:1", "object"]),
        ("other.jsonl", b'{"input": "a"}\n{"question": "b"}\n', ["other.jsonl:2", "--input_key"]),
        ("null.jsonl", b'{"input": null}\n', ["null.jsonl:1", "'input'"]),
        ("blank.jsonl", b'{"input": " "}\n', ["blank.jsonl:1", "empty"]),
        ("empty.jsonl", b"", ["empty.jsonl", "no rows"]),
        ("latin.jsonl", b'{"input": "\xe9"}\n', ["latin.jsonl:1", "UTF-8"]),
        ("data.csv", b"input\na\n", ["data.csv", ".jsonl"]),
        ("single.json", b'{"input": "a"}', ["single.json", "list"]),
    ],
)
def test_data_errors(folder, capsys, flag, name, content, expected):
    if content is not None:
        (folder / name).write_bytes(content)
    assert train(**{flag: name}) == 4
    assert_clear(capsys.readouterr().err, expected)


def test_all_problems_of_a_command_line_come_at_once(folder, capsys):
    assert train(foo="1", temperature="hot", top_k="0", load_in_4bit="True") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("lightrft: ") for line in lines)


def test_toml_that_is_none_names_line_and_column(folder, capsys):
    (folder / "run.toml").write_text("temperature = \n")
    assert train(config="run.toml") == 2
    assert_clear(capsys.readouterr().err, ["run.toml", "line 1"])


def test_options_without_effect_are_errors_only_under_strict(folder, capsys):
    good = ["--pretrain", "model", "--prompt_data", "good.jsonl", "--reward_fn", "reward.py:f"]
    good += ["--rollout_batch_size", "16"]
    assert main(["train", *good, "--kl_horizon", "5", "--strict"]) == 2
    assert_clear(capsys.readouterr().err, ["kl_horizon acts only with kl_target"])
    assert train(kl_horizon="5") == 1
    assert "a run was started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["trian"], ["unknown command 'trian'", "train"]),
        (["init-model"], ["DIR"]),
        (["init-model", "new", "--preset", "tiny"], ["'tiny'", "tiny-qwen3"]),
        (["init-model", "model"], ["model is not empty"]),
        (["init-model", "reward.py"], ["reward.py is a file"]),
        (["init-model", "new", "--seed", "-1"], ["--seed", "'-1'"]),
        (["quickstart", "--algorithm", "gpro"], ["--algorithm", "'gpro'", "grpo"]),
        (["quickstart", "--strategy", "ddp"], ["--strategy", "'ddp'", "fsdp"]),
        (["quickstart", "--steps", "0"], ["--steps", "'0'"]),
        (["quickstart", "--output_dir", "model"], ["model is not empty"]),
        (["quickstart", "--stepz", "3"], ["--stepz"]),
    ],
)
def test_usage_errors_of_other_commands(folder, capsys, argv, expected):
    assert main(argv) == 2
    assert_clear(capsys.readouterr().err, expected)
    assert not (folder / "new").exists()


def test_the_same_mistake_is_found_in_a_worker(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert train() == 2
    assert "lightrft[1]: rollout_batch_size" in capsys.readouterr().err


def test_nothing_is_written_for_bad_input(folder):
    before = sorted(path.name for path in folder.rglob("*"))
    train(temperature="hot")
    train(prompt_data="none.jsonl")
    assert sorted(path.name for path in folder.rglob("*")) == before


def assert_clear(text, expected):
    assert text.startswith("lightrft: ")
    assert len(text.splitlines()) == 1, text
    assert "Traceback" not in text
    for part in expected:
        assert part in text, text
