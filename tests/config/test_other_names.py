"""Names of options in TRL, verl and OpenRLHF lead to ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightrft.cli.options import UNAVAILABLE, available_options, unknown_flags
from lightrft.config import TrainConfig
from lightrft.config.other_names import (
    NAMES_OF_COMMANDS,
    OTHER_NAMES,
    PROCESSES,
    option_hint,
)
from lightrft.config.registry import PREFERENCE_LOSSES, keyword_options


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_leads_to_an_option_and_is_none_itself(name: str) -> None:
    known = available_options()
    assert name not in known
    assert name not in UNAVAILABLE
    first = OTHER_NAMES[name].split()[0].rstrip(",")
    assert first in known or first == PROCESSES
    assert option_hint(name, known) == f"; here it is {OTHER_NAMES[name]}"


OF_COMMANDS = [(command, name) for command, own in NAMES_OF_COMMANDS.items() for name in own]


@pytest.mark.parametrize(("command", "name"), OF_COMMANDS)
def test_names_of_a_trainer_lead_to_options_of_its_command(command: str, name: str) -> None:
    known, there = available_options(command), NAMES_OF_COMMANDS[command][name]
    assert name not in known
    assert there.split()[0].rstrip(",") in known
    assert unknown_flags([f"--{name}"], command) == [f"unknown option {name!r}; here it is {there}"]


def test_what_is_named_as_a_value_of_a_loss_is_one() -> None:
    losses = map(PREFERENCE_LOSSES.load, PREFERENCE_LOSSES)
    known = {value for loss in losses for value in keyword_options(loss)}  # type: ignore[arg-type]
    named = [text.split(", ")[1] for text in NAMES_OF_COMMANDS["prefer"].values() if "=" in text]
    assert len(named) == 7
    assert {text.removesuffix("=...") for text in named} <= known


@pytest.mark.parametrize(
    ("argument", "there"),
    [
        ("--num_generations", "n_samples_per_prompt"),
        ("--beta=0.04", "init_kl_coef"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_learning_rate"),
        ("actor_rollout_ref.rollout.temperature=0.7", "temperature"),
        ("data.train_batch_size=64", "rollout_batch_size"),
        ("--train.batch_size", "train_batch_size"),
        ("--actor.num_gpus_per_node", "nproc_per_node"),
    ],
)
def test_arguments_as_those_programs_take_them(argument: str, there: str) -> None:
    (problem,) = unknown_flags([argument])
    assert problem.split("here it is ")[1].split(",")[0] == there


def test_what_a_command_does_not_take_is_not_named() -> None:
    assert "n_samples_per_prompt" not in unknown_flags(["--num_generations"], "sft")[0]


PAGE = re.compile(r"^\| `([^`]+)` \| `(\w+)` \|$", re.MULTILINE)


@pytest.mark.parametrize("page", ["from_verl.md", "from_openrlhf.md"])
def test_the_tables_of_the_pages_say_what_the_command_line_says(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    rows, known = PAGE.findall(text), available_options()
    assert len(rows) == text.count("\n| ") - 1 >= 30
    found = {name: option_hint(name, known).removeprefix("; here it is ") for name, _ in rows}
    assert {name: there.split(",")[0] for name, there in found.items()} == dict(rows)


def test_python_says_the_same() -> None:
    with pytest.raises(TypeError, match="no option 'num_generations'; here it is n_samples_per"):
        TrainConfig().replaced({"num_generations": 4})
