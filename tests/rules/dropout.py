"""Dropout is off while a model scores and while it is updated, or both have one mask."""

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.rules import spoken
from tests.rules.stages import Cell, cells
from tests.stages.preference import preference_world
from tests.stages.reward import reward_world
from tests.stages.stage_world import STILL, distance, train_step
from tests.stages.test_equal_steps import CASES, build

from lightrft.reporting.files import JsonLines
from lightrft.stages.policy import policy_stage
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import byte_level_tokenizer, random_model, save_checked
from lightrft.trainer import train

DROPPING = {"attention_dropout": 0.5}
CASES_OF = {
    "sft": ["sft"],
    "prefer": ["prefer dpo", "prefer kto"],
    "reward": ["reward"],
    "distill on rows": ["divergence"],
}
RATIO = ("ratio_mean", "ratio_max", "approx_kl", "clip_fraction_low", "clip_fraction_high")
SMALL = {**spoken.SMALL, "generate_max_len": 6, "actor_learning_rate": 1e-2, "lr_warmup_ratio": 0.0}


def change_by_dropout(case):
    """Relative distance between the gradients of a step of models with and without dropout."""
    make = reward_world.tiny_classifier if case == "reward" else tiny_model
    gradients = []
    for options in (DROPPING, {}):
        torch.manual_seed(0)
        model = make(**options)
        if case.startswith("prefer"):
            model = preference_world.noisy_model(model)
        made, items = build(get_fake_strategy(STILL), case, model=model)
        gradients.append(train_step(made, items)[0])
    return distance(*gradients)


def no_dropout_reaches_what_is_compared(stage):
    for case in CASES_OF[stage]:
        assert case in CASES
        assert change_by_dropout(case) <= 1e-6


def dropout_acts_as_the_configuration_asks():
    assert change_by_dropout("sft") > 1e-2


def dropping_model(folder):
    """A folder of a random GPT-2 with its own dropout of 0.1 in three places."""
    from transformers import GPT2Config

    tokenizer = byte_level_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, initializer_range=0.2
    )
    assert config.attn_pdrop == config.embd_pdrop == config.resid_pdrop == 0.1
    save_checked(random_model(config, tokenizer, 1), tokenizer, folder / "model", sample="a b")
    return str(folder / "model")


def ratios(folder, model, *, num_steps, **options):
    """What tells the policy of an update from that of its samples, of the last step."""
    rows = [{"input": f"Say {n}."} for n in range(8)]
    train(
        model,
        rows,
        lambda responses: [len(set(text)) / 8 for text in responses],
        output_dir=str(folder / "run"),
        **{**SMALL, "max_steps": num_steps, **options},
    )
    return dict(JsonLines(folder / "run/metrics.jsonl"))[num_steps]


def require_one(metrics):
    assert [metrics[name] for name in RATIO] == pytest.approx([1, 1, 0, 0, 0], abs=1e-5)


def the_ratio_of_an_unchanged_policy_is_one(stage, tmp_path, capsys):
    model = dropping_model(tmp_path)
    options = {"teacher": model} if stage.startswith("distill") else {}
    # Two passes over the samples of one update, as its first epoch has them with a reference.
    require_one(ratios(tmp_path, model, num_steps=1, init_kl_coef=0.1, **options))
    # That of adapters shows in the second step: at first they add nothing.
    from lightrft.tools.model_presets import write_tiny_model

    write_tiny_model(tmp_path / "plain/model", "tiny-qwen3", seed=1)
    model = str(tmp_path / "plain/model")
    options = {"teacher": model} if options else {}
    adapters = {"lora_rank": 4, "lora_dropout": 0.3, "init_kl_coef": 0.1, **options}
    require_one(ratios(tmp_path / "plain", model, num_steps=2, **adapters))
    assert "option without effect: lora_dropout is off in reinforcement" in capsys.readouterr().out


def dropout_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_stage.PolicyStage, "kept_dropout", "model")
    metrics = ratios(tmp_path, dropping_model(tmp_path), num_steps=1, init_kl_coef=0.1)
    assert metrics["ratio_max"] > 2
    assert metrics["approx_kl"] > 0.1


def the_ratio_is_one_and_would_not_be(
    stage,
    tmp_path,
    capsys,
    monkeypatch,
):
    the_ratio_of_an_unchanged_policy_is_one(stage, tmp_path, capsys)
    (tmp_path / "other").mkdir()
    dropout_would_be_seen(tmp_path / "other", monkeypatch)


CELLS: dict[str, Cell] = cells(
    {
        "sft": dropout_acts_as_the_configuration_asks,
        "prefer, reward, distill on rows": no_dropout_reaches_what_is_compared,
        "distill on samples": the_ratio_of_an_unchanged_policy_is_one,
        "train": the_ratio_is_one_and_would_not_be,
    },
    {
        "environments, tools, agents": "Their samples are scored and trained on as those of train.",
        "judge and reward models": "They only score, in evaluation mode, and are never updated.",
        "eval, serve, rows": "Nothing is updated, and engines sample in evaluation mode.",
        "data check": "No model is updated, and none scores anything in training mode.",
    },
)
