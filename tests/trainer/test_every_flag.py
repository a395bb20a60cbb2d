"""Every documented flag exists and acts, or is refused with the name of what replaces it."""

import ast
import json
import re
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from lightrft.cli.main import main
from lightrft.cli.options import NAMES_OF_COMMANDS, UNAVAILABLE, available_options
from lightrft.config import TrainConfig
from lightrft.config.options import SFT
from lightrft.engines.media.media import MEDIA_KINDS
from lightrft.rollout.sampler import training_params
from lightrft.run.assembly import open_console
from lightrft.stages.policy.inputs import pretrain_mix
from lightrft.stages.policy.models import build_models
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.engine.session import engine_config

PACKAGES = Path(__file__).parents[2] / "packages"

# The flags that LightRFT's library, its examples and its documents name.
DOCUMENTED = Path(__file__).with_name("documented_flags.txt").read_text().split()


def micro_tokens(config):
    return config.max_micro_tokens(config.micro_train_batch_size)


def engine(config):
    return engine_config(config, "vllm", has_gpu=False, module=None)


def deadline(config):
    with get_fake_strategy(config) as strategy:
        return strategy.context.timeout


def console(config):
    """Whether the first step gets a line."""
    with redirect_stdout(StringIO()) as text, ExitStack() as stack:
        open_console(config, stack).log(1, {"reward": 1.0})
    return text.getvalue().count("reward")


def texts(config):
    return [row.key for row in pretrain_mix(config, _tokenizer(config)).texts]


def _tokenizer(config):
    from lightrft.models import load_tokenizer

    return load_tokenizer(config.pretrain)


def recipes(config):
    from lightrft.stages.policy.rewards import reward_recipes

    return reward_recipes(config, []).column


def bucket(config):
    """Bytes of the buckets in which an engine of its own storage gets the weights."""
    with get_fake_strategy(config) as strategy:
        actor = build_models(config, strategy, 10)[0].main.model
        strategy.setup_inference_engine(config, "hf", actor=actor)
        return strategy.broadcast_manager.bucket_bytes


# Another value, what shows its effect, and what else has to be set.
OBSERVED = {
    "seed": (7, training_params, {}),
    "stop": (("\n",), training_params, {}),
    "packing_samples": (True, micro_tokens, {}),
    "engine_mem_util": (0.3, engine, {}),
    "max_len": (99, engine, {"prompt_max_len": 64, "generate_max_len": 8}),
    "weight_bucket_mb": (3, bucket, {}),
    "timeout_minutes": (3.0, deadline, {}),
    "logging_steps": (2, console, {}),
    "pretrain_column": ("other", texts, {"pretrain_data": "texts.jsonl", "ptx_coef": 0.1}),
    "reward_recipe_column": ("kind", recipes, {"reward_recipe": "recipes.toml"}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"{n}?", "text": "a b", "other": "c d e"} for n in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train.jsonl", "texts.jsonl"):
        (tmp_path / name).write_text(text)
    (tmp_path / "r.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")
    (tmp_path / "recipes.toml").write_text("[a]\nf = 1\n")
    return tmp_path


def test_every_documented_flag_is_an_option_or_refused():
    options = set(available_options())
    assert [name for name in DOCUMENTED if name not in options | set(UNAVAILABLE)] == []
    assert options.isdisjoint(UNAVAILABLE)


def names_of_kinds(text):
    """Options that a loop over the kinds of media reads by an f-string."""
    return {
        text[2:-1].replace("{kind.plural}", row.plural).replace("{kind}", kind)
        for kind, row in MEDIA_KINDS.items()
    }


@pytest.mark.full
def test_every_option_is_read_by_the_code_that_carries_it_out():
    """Outside of the record and its rules: as an attribute or by its name."""
    found = set()
    for path in PACKAGES.glob("*/src/lightrft/**/*.py"):
        if path.name not in ("rules.py", "strategy_config.py", "unavailable.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.JoinedStr):
                    found |= names_of_kinds(ast.unparse(node))
                elif isinstance(node, ast.Constant) and path.parent.name != "config":
                    found.add(node.value)
    assert {n for each in ("train", *SFT) for n in available_options(each)} - found == set()


@pytest.mark.parametrize("name", OBSERVED)
def test_another_value_has_another_effect(folder, tiny_model, name):
    value, observe, needed = OBSERVED[name]
    base = {
        "pretrain": tiny_model,
        "prompt_data": "train.jsonl",
        "reward_fn": ("r.py:f",),
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "generate_max_len": 1000,
        "init_kl_coef": 0.0,
        "output_dir": "run",
        "micro_train_batch_size": 1,
        **needed,
    }
    before, again = observe(TrainConfig(**base)), observe(TrainConfig(**base))
    assert before == again  # what is observed depends on nothing else
    assert observe(TrainConfig(**{**base, name: value})) != before


def test_the_number_and_size_of_checkpoints_are_limited(build_world, tmp_path):
    limits = {"max_ckpt_num": {"max_ckpt_num": 1}, "max_ckpt_mem": {"max_ckpt_mem": 0.001}, "": {}}
    left = {}
    for name, limit in limits.items():
        world = build_world(ckpt_path=str(tmp_path / f"c{name}"), **limit)
        for step in (1, 2):
            world.trainer.loop.state = replace(world.trainer.state, num_steps=step)
            world.trainer.save_checkpoint()
        left[name] = len(list((tmp_path / f"c{name}" / "_actor").glob("global_step*")))
    assert left == {"max_ckpt_num": 1, "max_ckpt_mem": 1, "": 2}


def test_refused_flags_name_what_replaces_them(folder, capsys):
    # What a name means in TRL's trainer of the same stage comes first.
    known = NAMES_OF_COMMANDS["train"]
    refused = [name for name in DOCUMENTED if name in UNAVAILABLE and name not in known]
    assert len(refused) > 40
    words = [word for name in refused for word in (f"--{name}", "1")]
    assert main(["train", "--pretrain", "x", *words, "--loss_type", "dapo"]) == 2
    text = capsys.readouterr().err
    assert f"'loss_type'; here it is {known['loss_type']}\n" in text
    for name in refused:
        assert f"lightrft: {name} is not available: {UNAVAILABLE[name]}\n" in text
    options = {name for command in ("train", "reward") for name in available_options(command)}
    for name in refused:
        named = re.findall(r"--(\w+)", UNAVAILABLE[name])
        assert set(named) <= {*options, "config"}, name
