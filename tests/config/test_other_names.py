"""Names of options in TRL, verl and OpenRLHF lead to ours."""

import re

import pytest

from lightrft.cli.main import main
from lightrft.cli.options import available_options, merge_options, parse_options, unknown_flags
from lightrft.cli.train import stage_parser
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import ALGORITHMS, did_you_mean
from lightrft.config.other_names import (
    NAMES_OF_COMMANDS,
    OTHER_NAMES,
    PROCESSES,
    UNAVAILABLE,
    option_hint,
    said_once,
)
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    REWARD_LOSSES,
    keyword_options,
)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_leads_to_an_option_and_is_none_itself(name):
    known = available_options()
    assert name not in known
    assert name not in UNAVAILABLE
    first = OTHER_NAMES[name].split()[0].rstrip(",")
    assert first in known or first == PROCESSES
    assert option_hint(name, known) == f"; here it is {OTHER_NAMES[name]}"


OF_COMMANDS = [(command, name) for command, own in NAMES_OF_COMMANDS.items() for name in own]


@pytest.mark.parametrize("command, name", OF_COMMANDS)
def test_names_of_a_trainer_lead_to_options_of_its_command(command, name):
    known, there = available_options(command), NAMES_OF_COMMANDS[command][name]
    assert name not in known
    assert there.split()[0].rstrip(",") in known
    assert unknown_flags([f"--{name}"], command) == [f"unknown option {name!r}; here it is {there}"]


def test_what_is_named_as_a_value_of_a_loss_is_one():
    losses = map(PREFERENCE_LOSSES.load, PREFERENCE_LOSSES)
    known = {value for loss in losses for value in keyword_options(loss)}  # type: ignore[arg-type]
    named = [text.split(", ")[1] for text in NAMES_OF_COMMANDS["prefer"].values() if "=" in text]
    assert len(named) == 7
    assert {text.removesuffix("=...") for text in named} <= known


@pytest.mark.parametrize(
    "argument, there",
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
def test_arguments_as_those_programs_take_them(argument, there):
    (problem,) = unknown_flags([argument])
    assert problem.split("here it is ")[1].split(",")[0] == there


SAME = [
    ("train", "--learning_rate 2e-5", {"actor_learning_rate": 2e-5}),
    ("train", "--model_name_or_path=tiny", {"pretrain": "tiny"}),
    ("train", "--dataset-name a.jsonl", {"prompt_data": "a.jsonl"}),
    ("train", "--num_generations 4", {"n_samples_per_prompt": 4}),
    ("train", "--max_completion_length 8", {"generate_max_len": 8}),
    ("train", "--weight_decay 0.1 --lora_r 4", {"l2": 0.1, "lora_rank": 4}),
    ("train", "--num_train_epochs 3", {"num_episodes": 3}),
    ("train", "--data.train_batch_size=64", {"rollout_batch_size": 64}),
    ("train", "--no_use_remove_padding", {"packing_samples": False}),
    ("train", "--lora_target_modules q_proj v_proj", {"target_modules": ("q_proj", "v_proj")}),
    ("sft", "--warmup_ratio 0.1", {"lr_warmup_ratio": 0.1}),
    ("sft", "--num_train_epochs 3 --max_grad_norm 2", {"max_epochs": 3, "max_norm": 2.0}),
    ("prefer", "--beta 0.2 --loss_type ipo", {"preference_args": {"beta": 0.2}}),
    ("prefer", "--beta=0.2 --loss_type ipo hinge", {"preference_loss": ("ipo", "hinge")}),
    ("reward", "--center_rewards_coefficient 0.01", {"centering_coef": 0.01}),
]


@pytest.mark.parametrize("command, arguments, expected", SAME)
def test_names_that_mean_the_same_are_taken_with_one_line(capsys, command, arguments, expected):
    said_once.cache_clear()
    parser = stage_parser(command, "", lists_all=True)
    config, _, problems = parse_options(parser, arguments.split())
    assert problems == []
    assert {name: config.__dict__[name] for name in expected} == expected
    said = capsys.readouterr().err
    assert said.startswith("lightrft: names of other libraries: ")
    assert said.count("\n") == 1
    assert all(name in said for name in expected)


def test_toml_files_and_python_take_them_too(tmp_path, capsys):
    said_once.cache_clear()
    path = tmp_path / "run.toml"
    path.write_text("num_generations = 4\nbeta = 0.2\n")
    config, problems = merge_options([path], {}, "prefer")
    assert config.preference_args == {"beta": 0.2}
    assert "unknown option 'num_generations'" in problems[0]  # prefer samples nothing
    path.write_text("num_generations = 4\n")
    assert TrainConfig.load(path).n_samples_per_prompt == 4
    assert TrainConfig().replaced({"num_generations": 4}).n_samples_per_prompt == 4
    changed = TrainConfig().replaced({"beta": 0.2, "preference_args": {"tau": 1.0}}, "prefer")
    assert changed.preference_args == {"beta": 0.2, "tau": 1.0}
    assert capsys.readouterr().err == (
        "lightrft: names of other libraries: beta is preference_args beta=...\n"
        "lightrft: names of other libraries: num_generations is n_samples_per_prompt\n"
    )


def test_both_names_of_an_option_are_refused(tmp_path):
    parser = stage_parser("train", "", lists_all=True)
    both = ["--num_generations", "4", "--n_samples_per_prompt", "8"]
    twice = ["--lr", "1e-5", "--learning_rate", "1e-5"]
    for arguments, named in ((both, "--num_generations"), (twice, "--learning_rate")):
        _, _, (problem,) = parse_options(parser, arguments)
        assert problem.startswith(named)
        assert problem.endswith("are one option: give one of them")
    changes = {"num_generations": 4, "n_samples_per_prompt": 8}
    with pytest.raises(TypeError, match="num_generations and n_samples_per_prompt are one option"):
        TrainConfig().replaced(changes)
    path = tmp_path / "run.toml"
    path.write_text("beta = 0.1\npreference_args = {beta = 0.2}\n")
    assert "are one option" in merge_options([path], {}, "prefer")[1][0]


def test_python_names_the_nearest_options_and_not_all():
    with pytest.raises(TypeError) as error:
        TrainConfig().replaced({"stirring": False, "rolout_batch_size": 4})
    assert len(str(error.value)) < 250
    assert "lightrft train --help_all lists all" in str(error.value)
    assert "did you mean rollout_batch_size" in str(error.value)


@pytest.mark.parametrize(
    "command, name",
    [
        ("train", "deepspeed"),
        ("train", "torch_dtype"),
        ("train", "attn_implementation"),
        ("train", "push_to_hub"),
        ("sft", "dataset_text_field"),
        ("train", "neftune_noise_alpha"),
        ("train", "device"),
        ("train", "dataloader_num_workers"),
        ("train", "peft_config"),
        ("prefer", "max_prompt_length"),
    ],
)
def test_names_of_trl_and_transformers_are_answered_and_never_guessed(command, name):
    (line,) = unknown_flags([f"--{name}"], command)
    assert "did you mean" not in line
    assert "lists all" not in line


@pytest.mark.parametrize(
    "registry", [POLICY_LOSSES, ADVANTAGE_ESTIMATORS, PREFERENCE_LOSSES, REWARD_LOSSES]
)
def test_a_guess_never_crosses_to_another_algorithm(registry):
    everything = {*ALGORITHMS, *POLICY_LOSSES, *ADVANTAGE_ESTIMATORS, *PREFERENCE_LOSSES}
    for name in everything - {*registry}:
        assert "did you mean" not in did_you_mean(name, registry)


@pytest.mark.parametrize("command", ["grpo", "dpo", "kto", "GRPO"])
def test_a_command_of_an_algorithms_name_is_answered(command, capsys):
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert "did you mean" not in said
    assert re.search(rf"; {command} is .*lightrft (train|prefer)", said)
    with pytest.raises(ConfigError, match=f"; {command} is ") as error:
        TrainConfig(policy_loss=command)
    assert "did you mean" not in str(error.value)
