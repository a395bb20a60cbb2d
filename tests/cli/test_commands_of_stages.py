"""The commands of stages from the command line: the file of a run may be given again."""

import pytest
from tests.runs import steps, tiny_models, write
from tests.stages.row_stages import write_rows

from lightrft.cli.main import main

# Options of a command, and what its last lines say.
COMMANDS = {
    "sft": ("--train_on all", "lightrft export run run_exported"),
    "prefer": (
        "--preference_loss sigmoid bco_pair sft --preference_weights 0.8 0.2 1 "
        "--preference_args beta=0.2",
        "lightrft export run run_exported",
    ),
    "reward": (
        "--reward_loss own.py:squared --reward_loss_args target=2",
        "lightrft train --reward_pretrain run/model",
    ),
    "distill": ("--teacher_form jsd --teacher model", "lightrft export run"),
}
OWN_LOSS = """
def squared(differences, is_tie, *, target=1.0):
    return (differences - target) ** 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_LOSS)
    write(tmp_path / "asked.jsonl", [{"input": f"say {c}", "label": "#### 2"} for c in "abcd"])
    return tiny_models(tmp_path, "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_of_a_run_may_be_given_again_and_its_model_is_exported(folder, capsys, command):
    write_rows(folder)
    options, said = COMMANDS[command]
    sizes = "--train_batch_size 8 --max_row_tokens 64 --fsdp --output_dir run"
    line = f"--pretrain model --prompt_data rows.jsonl {sizes} {options}"
    assert main([command, *line.split()]) == 0
    assert said in capsys.readouterr().out
    again = ["--config", "run/config.toml"]
    assert main([command, *again, "--output_dir", "again"]) == 0
    assert steps(folder / "again")[-1]["loss"] == steps(folder / "run")[-1]["loss"]
    assert main(["export", "run", "exported"]) == 0
    assert (folder / "exported/model.safetensors").is_file()
    assert main(["config", "show", *again, "--changed"]) == 0
    assert options.split()[0].removeprefix("--") in capsys.readouterr().out
    if command == "sft":
        asked = "--eval_data asked.jsonl --reward_fn gsm8k --generate_max_len 4"
        assert main(["eval", "run", *asked.split(), "--output_dir", "scored"]) == 0
    if command == "reward":
        card = (folder / "exported/README.md").read_text()
        assert "# Reward model" in card
        assert "model = AutoModelForSequenceClassification" in card


@pytest.mark.full
def test_rewards_of_distillation_are_reported_and_the_file_of_its_run_is_one_of_train(
    folder, capsys
):
    line = "--pretrain model --prompt_data asked.jsonl --teacher model --reward_fn gsm8k --fsdp"
    line += " --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_steps 1"
    line += " --generate_max_len 4 --eval_data asked.jsonl --output_dir run"
    assert main(["distill", *line.split()]) == 0
    assert "lightrft export run" in capsys.readouterr().out
    metrics = steps(folder / "run")
    assert "eval/reward" in metrics[0]
    assert metrics[-1]["advantage_abs"] < 1e-5
    # The options say all: `train` with them is the same run.
    for command in ("distill", "train"):
        again = ["--config", "run/config.toml", "--output_dir", command]
        assert main([command, *again]) == 0


def test_help_names_the_learning_rates_of_the_stages(capsys):
    assert main(["sft", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unset means train 1e-06, sft 1e-05 (0.0001 for adapters), " in said
