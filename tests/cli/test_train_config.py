"""The record of training options: rules, files, and agreement with what carries them out."""

import contextlib
import re
from itertools import product

import pytest

from lightrft.cli.options import available_options, merge_options
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.registry import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REGISTRIES,
)
from lightrft.config.toml import format_toml
from lightrft.config.train_config import batch_problems
from lightrft.stages.policy.algorithm import (
    algorithm_problems,
    build_algorithm,
    unused_algorithm_options,
)
from lightrft.utils.arguments import GROUPS


def test_every_option_has_help_and_a_group():
    for name, info in available_options().items():
        assert info.help.endswith("."), name
        assert info.group in GROUPS, name


def test_choices_are_those_of_what_carries_them_out():
    from lightrft.algorithms import aggregation, kl
    from lightrft.algorithms.interface import advantage_traits, policy_loss_traits
    from lightrft.engines.factory import ENGINES
    from lightrft.strategy.optimizers import LR_SCHEDULES

    assert set(AGGREGATIONS) == set(aggregation.AGGREGATIONS)
    assert set(KL_ESTIMATORS) <= set(kl.KL_ESTIMATORS)
    choices = {name: info.choices for name, info in available_options().items()}
    assert set(choices["lr_scheduler"]) == set(LR_SCHEDULES)
    assert set(ENGINES) - {"fake"} <= set(choices["engine_type"])
    for name in POLICY_LOSSES:
        assert policy_loss_traits(POLICY_LOSSES.load(name)).aggregation in AGGREGATIONS
    for name in ADVANTAGE_ESTIMATORS:
        assert advantage_traits(ADVANTAGE_ESTIMATORS.load(name))
    others = {name for command in ("prefer", "reward") for name in available_options(command)}
    assert set(REGISTRIES) <= {*choices, *others}


def test_saved_options_come_back(tmp_path):
    config = TrainConfig(
        pretrain='a "quoted"\tpath\\n',
        adam_betas=(0.8, 0.9),
        reward_fn=("boxed_math", "r.py:f"),
        engine_args={"max_num_seqs": 4, "enforce_eager": True, "a b": "x"},
        bf16=False,
        max_steps=3,
        top_p=0.5,
        system_prompt="ü\n☃",
        apply_chat_template=True,
    )
    config.save(tmp_path / "deep/config.toml")
    assert TrainConfig.load(tmp_path / "deep/config.toml") == config
    assert TrainConfig.load(tmp_path / "deep/config.toml") != TrainConfig()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["config.toml"]


def test_control_characters_survive_toml(tmp_path):
    text = "".join(map(chr, range(1, 0x100))) + "\U0001f600"
    TrainConfig(pretrain=text).save(tmp_path / "c.toml")
    assert TrainConfig.load(tmp_path / "c.toml").pretrain == text


def test_toml_has_no_literal_for_an_object():
    with pytest.raises(TypeError, match="no TOML literal"):
        format_toml(object())


@pytest.mark.full
@pytest.mark.parametrize("value", ["text", -1, 0, 2.5, True, [1], ["a"], {"a": 1}, ()])
def test_a_value_of_any_type_is_accepted_or_named(value):
    for name in available_options():
        with contextlib.suppress(ConfigError):  # any other error would be a bug
            TrainConfig(**{name: value})


def test_paths_follow_the_output_directory_unless_given():
    assert str(TrainConfig(output_dir="run").checkpoint_dir) == "run/checkpoints"
    assert str(TrainConfig(output_dir="run").model_dir) == "run/model"
    assert str(TrainConfig(output_dir="run", ckpt_path="c").checkpoint_dir) == "c"


def test_idle_options_are_named_and_defaults_are_not():
    assert TrainConfig(fsdp=True).unused_options() == []
    config = TrainConfig(lambd=0.5, kl_horizon=5, eval_steps=2, chunk_size=9)
    idle = [line.split()[0] for line in config.unused_options()]
    assert idle == ["chunk_size", "kl_horizon", "eval_steps"]
    for name, idle in (("group_norm", True), ("gae", False)):
        chosen = config.replaced({"advantage_estimator": name})
        found = unused_algorithm_options(chosen, build_algorithm(chosen))
        assert any(line.startswith("lambd acts only with") for line in found) == idle


@pytest.mark.parametrize(
    "prompts, group, train, micro, ranks",
    list(product([1, 6, 16, 20], [1, 8], [4, 12, 64, 100], [1, 3], [1, 2])),
)
def test_batch_sizes_are_legal_exactly_if_nothing_is_reported(prompts, group, train, micro, ranks):
    config = TrainConfig(
        rollout_batch_size=prompts,
        n_samples_per_prompt=group,
        train_batch_size=train,
        micro_train_batch_size=micro,
        advantage_estimator="reinforce++",
    )
    found = batch_problems(config, ranks)
    is_legal = (
        prompts % ranks == 0
        and train % (micro * ranks) == 0
        and (prompts * group) % train == 0
        and prompts * group > 0
    )
    assert (found == []) == is_legal

    # That each of them is legal: `test_every_proposed_size_passes_all_rules`.


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce++"},
        {"freezing_actor_steps": 3, "advantage_estimator": "gae"},
        {"dual_clip": 3.0, "eps_clip_low": 0.1},
        {"advantage_estimator": "cpgd", "advantage_args": {"weighting": "std"}},
        {"off_policy_correction": ("tis", "token-veto")},
    ],
    ids=lambda values: "-".join(values) or "defaults",
)
def test_what_the_algorithm_can_take_is_accepted(values):
    assert algorithm_problems(TrainConfig(**values)) == []


def test_the_file_of_a_run_is_taken_again(tmp_path):
    """It holds the defaults of options that are refused, too."""
    path = tmp_path / "config.toml"
    TrainConfig(seed=7).save(path)
    assert "rm_use_engine = false" in path.read_text()
    config, problems = merge_options([path], {})
    assert (config.seed, problems) == (7, [])
    path.write_text("rm_use_engine = true\n")
    _, (problem,) = merge_options([path], {})
    assert "config.toml: rm_use_engine is not available" in problem


@pytest.mark.parametrize(
    "options, remedy",
    [
        ({"reward_fn": len}, r"lightrft\.trainer\.train\(MODEL, ROWS, FUNCTION\)"),
        ({"prompt_data": [{"input": "a"}]}, r"lightrft\.trainer\.train"),
        ({"reward_fn": "gsm8k"}, r"such as \('gsm8k',\)"),
    ],
)
def test_a_script_that_gives_another_type_hears_what_takes_it(options, remedy):
    with pytest.raises(ConfigError, match=remedy):
        TrainConfig(**options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_proposed_size_passes_all_rules(ranks):
    sizes = product([2, 3, 6], [2, 4], [3, 4, 8, 16], [1, 3, 5])
    names = [
        "rollout_batch_size",
        "n_samples_per_prompt",
        "train_batch_size",
        "micro_train_batch_size",
    ]
    for values in sizes:
        config = TrainConfig(**dict(zip(names, values, strict=True)))
        lines = batch_problems(config, ranks)
        if len(lines) != 1 or "legal:" in lines[0]:
            continue
        pair = re.search(r"legal pair of them: (\d+) with (\d+)", lines[0])
        proposals = (
            [dict(zip(names[2:], map(int, pair.groups()), strict=True))]
            if pair
            else [
                {name: int(size)}
                for name, either in re.findall(r"legal (\w+): ([\d or]+)", lines[0])
                for size in re.findall(r"\d+", either)
            ]
        )
        assert proposals, lines
        for proposal in proposals:
            assert batch_problems(config.replaced(proposal), ranks) == [], (values, proposal)
