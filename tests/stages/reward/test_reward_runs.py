"""Whole runs of reward models: what they learn, where they load, and that they continue."""

from __future__ import annotations

import json
import math
import random
from functools import partial

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.runs import (
    Interrupted,
    continued,
    in_ranks,
    row_options,
    steps,
    write,
)
from tests.stages.reward.reward_world import pairs, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import ConfigError, TrainConfig
from lightrft.models import RewardModel
from lightrft.models.loading import ModelLoadError
from lightrft.run import assembly
from lightrft.run.assembly import run_training
from lightrft.tools.model_presets import write_tiny_model
from lightrft.trainer import RewardTrainer

NAMES = ("accuracy", "calibration_error", "length_correlation", "longer_accuracy", "score_std")


def test_what_separates_pairs_is_learned_and_loads_where_rewards_are_read(tmp_path, model, rows):
    held_out = write(tmp_path / "held_out.jsonl", pairs(16, seed=7))
    summary = run(
        model,
        rows,
        tmp_path / "run",
        max_epochs=6,
        eval_data=held_out,
        best_metric="eval/accuracy",
        centering_coef=0.01,
    )
    assert summary.verdict.startswith("trained: 18 of 18")
    assert summary.last_eval["eval/accuracy"] == 1.0
    assert summary.last_eval["eval/loss"] < 0.1 < 0.3 < summary.first_eval["eval/loss"]
    assert all(f"eval/{name}" in summary.last_eval for name in NAMES)
    assert (tmp_path / "run/checkpoints/best").is_dir()

    ours = RewardModel.from_pretrained(summary.model_dir).eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(summary.model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir, padding_side="right")
    texts = [
        f"{row['prompt']}{row[name]}{tokenizer.eos_token}"
        for row in pairs(24)
        for name in ("chosen", "rejected")
    ]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = theirs(**given).logits[:, 0]
        found = ours(given["input_ids"], given["attention_mask"].bool())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (found[::2] > found[1::2]).all()
    # The statistics are of these very rows.
    assert theirs.config.score_mean == pytest.approx(found.mean().item(), abs=1e-4)
    assert theirs.config.score_std == pytest.approx(found.std(correction=0).item(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_a_trained_reward_model_gives_rewards_in_reinforcement(tmp_path, model, rows, pooling):
    trained = run(model, rows, tmp_path / "run", max_steps=2, reward_pooling=pooling).model_dir
    prompts = write(tmp_path / "prompts.jsonl", [{"input": "name 1: "}, {"input": "name 2: "}])
    config = TrainConfig(
        pretrain=model,
        prompt_data=prompts,
        label_key=None,
        reward_pretrain=(trained,),
        output_dir=str(tmp_path / "ppo"),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        train_batch_size=4,
        micro_train_batch_size=2,
        generate_max_len=4,
        advantage_estimator="group_norm",
        num_threads=1,
        max_steps=1,
        save_trajectories=True,
    )
    assert run_training(config).num_steps == 1
    lines = (tmp_path / "ppo/trajectories.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    scorer = RewardModel.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(entries) == 4
    for entry in entries:
        asked = tokenizer(entry["prompt"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([asked + entry["token_ids"]])
        with torch.no_grad():
            score = scorer(ids, torch.ones_like(ids, dtype=torch.bool)).item()
        assert entry["reward"] == pytest.approx(score, abs=1e-4)


def test_a_swap_of_chosen_and_rejected_is_named(tmp_path, model, rows, capsys):
    swapped = write(tmp_path / "swapped.jsonl", pairs(16, seed=7, swapped=True))
    summary = run(model, rows, tmp_path / "run", max_epochs=4, eval_data=swapped)
    assert summary.last_eval["eval/accuracy"] < 0.1
    said = capsys.readouterr().out
    assert "of 16 held-out judgements are met, less than guessing would: chosen and" in said
    assert said.count("are probably swapped") == 1


def test_doubtful_data_are_named(tmp_path, model, capsys):
    doubled = pairs(8) + pairs(2, swapped=True)
    rows = write(tmp_path / "rows.jsonl", doubled)
    run(model, rows, tmp_path / "run", train_batch_size=10, max_epochs=1, eval_data=rows)
    said = capsys.readouterr().out
    assert "4 pairs stand in the data with the other answer chosen, too" in said
    assert "the prompts of 10 of 10 held-out judgements are trained on, too" in said


def test_padding_that_ends_texts_is_not_taken_for_padding(tmp_path, model, rows):
    folder = tmp_path / "alike"
    write_tiny_model(folder, "tiny-qwen3", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    alike = run(str(folder), rows, tmp_path / "run", max_steps=2, eval_data=rows)
    other = run(model, rows, tmp_path / "other", max_steps=2, eval_data=rows)
    # Padding plays no part in training.
    assert alike.last_eval["eval/loss"] == other.last_eval["eval/loss"]
    trained = AutoModelForSequenceClassification.from_pretrained(alike.model_dir).eval()
    assert trained.config.pad_token_id is None
    assert other.last_eval["eval/score"] != 0
    ids = tokenizer("name 1: word", return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    ours = RewardModel.from_pretrained(alike.model_dir).eval()
    with torch.no_grad():
        found = ours(ids, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(trained(ids).logits[:, 0], found, rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match="batch sizes > 1"):
            trained(ids.repeat(2, 1))


def test_a_reward_model_is_trained_on_from_where_it_was(tmp_path, model, rows):
    first = run(model, rows, tmp_path / "one", max_epochs=4, eval_data=rows)
    second = run(first.model_dir, rows, tmp_path / "two", max_steps=1, eval_data=rows)
    found = second.first_eval["eval/loss"]
    assert found == pytest.approx(first.last_eval["eval/loss"], abs=1e-5)
    assert found < 0.3


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "packing_samples": True}])
def test_an_interrupted_run_continues_to_the_bit(tmp_path, model, rows, changes):
    shared = {"actor_learning_rate": 1e-3, "train_batch_size": 8, "eval_data": rows}
    settings = partial(row_options, model, rows, save_steps=2, **shared, **changes)
    # In the middle of the second pass over the data.
    summary = continued(RewardTrainer, tmp_path, settings, 5)
    assert (summary.num_resumed_steps, summary.num_steps) == (4, 9)
    configs = [(tmp_path / name / "model/config.json").read_text() for name in ("whole", "parts")]
    assert configs[0] == configs[1]
    assert math.isfinite(json.loads(configs[0])["score_std"])


def test_a_run_that_ends_behind_its_last_checkpoint_exports_the_same_model(
    tmp_path, model, rows, monkeypatch
):
    settings = {"max_steps": 2, "save_steps": 1}
    run(model, rows, tmp_path / "whole", **settings)

    def fail(*args, **kwargs):
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(assembly, "finish_run", fail)
        run(model, rows, tmp_path / "parts", **settings)
    assert run(model, rows, tmp_path / "parts", **settings).num_resumed_steps == 2
    configs = [(tmp_path / name / "model/config.json").read_text() for name in ("whole", "parts")]
    assert "score_std" in configs[0]
    assert configs[0] == configs[1]


@pytest.mark.full
@pytest.mark.multiprocess
def test_two_ranks_train_on_the_pairs_of_one_and_continue(tmp_path, model, rows):
    changes = {"micro_train_batch_size": 2, "save_steps": 2, "eval_data": rows, "fsdp": True}
    changes |= {"train_batch_size": 8, "actor_learning_rate": 1e-3, "max_epochs": 2}
    RewardTrainer(TrainConfig(**row_options(model, rows, tmp_path / "one", **changes))).train()
    settings = row_options(model, rows, tmp_path / "two", **changes)
    args = ("RewardTrainer", [settings], 4)
    for (summary,) in run_multiprocess(in_ranks, 2, timeout_seconds=300, args=args):
        assert summary["num_resumed_steps"] == 2
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 7  # the evaluation before the first step, and six steps
    for expected, found in zip(one[1:], two[1:], strict=True):
        assert found["num_tokens"] == expected["num_tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
    configs = [json.loads((tmp_path / n / "model/config.json").read_text()) for n in ("one", "two")]
    assert configs[1]["score_mean"] == pytest.approx(configs[0]["score_mean"], abs=1e-3)


def test_labelled_answers_are_learned(tmp_path, model):
    rows = [
        {"prompt": each["prompt"], "completion": each[name], "label": name == "chosen"}
        for each in pairs(16)
        for name in ("chosen", "rejected")
    ]
    path = write(tmp_path / "labelled.jsonl", rows)
    summary = run(model, path, tmp_path / "run", max_epochs=6, eval_data=path)
    assert summary.last_eval["eval/accuracy"] == 1.0
    assert summary.last_eval["eval/loss"] < summary.first_eval["eval/loss"]


def test_labelled_steps_are_learned_and_the_last_one_is_what_others_read(tmp_path, model):
    draw = random.Random(5)
    rows = []
    for number in range(24):
        labels = [draw.random() < 0.5 for _ in range(3)]
        steps_of = [f"{draw.randrange(1000)} {'please' if good else 'at once'}" for good in labels]
        rows.append({"prompt": f"name {number}: ", "completions": steps_of, "labels": labels})
    path = write(tmp_path / "steps.jsonl", rows)
    summary = run(model, path, tmp_path / "run", max_epochs=8, eval_data=path)
    assert summary.last_eval["eval/accuracy"] == 1.0
    theirs = AutoModelForSequenceClassification.from_pretrained(summary.model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    for row in rows[:6]:
        text = row["prompt"] + "\n".join(row["completions"]) + tokenizer.eos_token
        with torch.no_grad():
            score = theirs(**tokenizer(text, return_tensors="pt")).logits.item()
        assert (score > 0) == row["labels"][-1]


def test_rankings_are_learned_beside_held_out_pairs(tmp_path, model, rows):
    ranked = [
        {
            "prompt": each["prompt"],
            "answers": [each["rejected"], each["chosen"], f"{each['chosen']} please"],
            "ranks": [2, 1, 1],
        }
        for each in pairs(16, seed=3)
    ]
    path = write(tmp_path / "ranked.jsonl", ranked)
    changes = {"reward_loss": "rao_kupper", "max_epochs": 6, "eval_data": rows}
    summary = run(model, path, tmp_path / "run", micro_train_batch_size=4, **changes)
    assert summary.verdict.startswith("trained: 12 of 12")
    assert summary.last_eval["eval/accuracy"] == 1.0
    assert 0 < summary.last_metrics["accuracy"] <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_kl_coef": 0.1}, "init_kl_coef is no option of lightrft reward"),
        ({"train_on": "all"}, "train_on is no option of lightrft reward"),
        ({"train_batch_size": 32}, "has 24 usable rows, less than one step takes"),
        ({"prompt_data": None}, "--prompt_data is missing"),
        ({"reward_loss": "bce"}, "reward_loss bce is of labelled answers, and prompt_data holds"),
        ({"reward_loss_args": {"tie_width": 1}}, "bradley_terry has no option 'tie_width'"),
        (
            {"reward_loss": "rao_kupper", "reward_loss_args": {"tie_width": 0.0}},
            "rao_kupper cannot be called .* tie_width must be positive",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, model, rows, changes, said):
    with pytest.raises(ConfigError, match=said):
        run(model, rows, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_classifier_of_several_kinds_is_not_trained(tmp_path, model, rows):
    path = tmp_path / "three"
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    classifier.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    with pytest.raises(ModelLoadError, match="must have one label: got num_labels = 3"):
        run(str(path), rows, tmp_path / "run")
