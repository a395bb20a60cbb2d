"""Whole runs of reward models: what they learn, and where they load."""

import json

import pytest
import torch
from tests.runs import FEW, Interrupted, rollout_options, train, write, write_inputs
from tests.stages.reward.reward_world import answers_of, pairs, run, scores_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.models import RewardModel
from lightrft.models.loading import ModelLoadError
from lightrft.run import assembly
from lightrft.tools.model_presets import write_tiny_model

NAMES = ("accuracy", "calibration_error", "length_correlation", "longer_accuracy", "score_std")


@pytest.mark.full
def test_what_separates_pairs_is_learned_and_loads_where_rewards_are_read(tmp_path, model, rows):
    held_out = write(tmp_path / "held_out.jsonl", pairs(16, seed=7))
    changes = {"max_epochs": 6, "best_metric": "eval/accuracy", "centering_coef": 0.01}
    summary = run(model, rows, tmp_path / "run", eval_data=held_out, **changes)
    assert summary.verdict.startswith("trained: 18 of 18")
    assert summary.last_eval["eval/accuracy"] == 1.0
    assert summary.last_eval["eval/loss"] < 0.1 < 0.3 < summary.first_eval["eval/loss"]
    assert all(f"eval/{name}" in summary.last_eval for name in NAMES)
    assert (tmp_path / "run/checkpoints/best").is_dir()
    scores = scores_of(summary.model_dir, answers_of(pairs(24)))
    assert (scores[::2] > scores[1::2]).all()
    # The statistics are of these very rows.
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["score_mean"] == pytest.approx(scores.mean().item(), abs=1e-4)
    assert config["score_std"] == pytest.approx(scores.std(correction=0).item(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_a_trained_reward_model_gives_rewards_in_reinforcement(tmp_path, model, rows, pooling):
    trained = run(model, rows, tmp_path / "run", max_steps=2, reward_pooling=pooling).model_dir
    write_inputs(tmp_path, [{"prompt": "name 1: "}, {"prompt": "name 2: "}])
    changes = FEW | {"max_steps": 1, "save_trajectories": True, "reward_fn": ()}
    settings = rollout_options(tmp_path, "ppo", pretrain=model, **changes)
    assert train({**settings, "reward_pretrain": (trained,)}).num_steps == 1
    lines = (tmp_path / "ppo/trajectories.jsonl").read_text().splitlines()
    scorer = RewardModel.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(lines) == 4
    for entry in map(json.loads, lines):
        asked = tokenizer(entry["prompt"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([asked + entry["token_ids"]])
        with torch.no_grad():
            score = scorer(ids, torch.ones_like(ids, dtype=torch.bool)).item()
        assert entry["reward"] == pytest.approx(score, abs=1e-4)


def test_doubtful_data_are_named(tmp_path, model, capsys):
    doubled = pairs(8) + pairs(2, swapped=True)
    rows = write(tmp_path / "rows.jsonl", doubled)
    run(model, rows, tmp_path / "run", train_batch_size=10, max_epochs=1, eval_data=rows)
    said = capsys.readouterr().out
    assert "4 pairs stand in the data with the other answer chosen, too" in said
    assert "the prompts of 10 of 10 held-out judgements are trained on, too" in said


@pytest.mark.full
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
    assert other.last_eval["eval/score"] != 0
    scores_of(alike.model_dir, ["name 1: word"])
    trained = AutoModelForSequenceClassification.from_pretrained(alike.model_dir).eval()
    assert trained.config.pad_token_id is None
    with pytest.raises(ValueError, match="batch sizes > 1"):
        trained(torch.tensor([[65, 66]] * 2))


@pytest.mark.full
def test_a_reward_model_is_trained_on_from_where_it_was(tmp_path, model, rows):
    first = run(model, rows, tmp_path / "one", max_epochs=4, eval_data=rows)
    second = run(first.model_dir, rows, tmp_path / "two", max_steps=1, eval_data=rows)
    loss = second.first_eval["eval/loss"]
    assert loss == pytest.approx(first.last_eval["eval/loss"], abs=1e-5)
    assert loss < 0.3


@pytest.mark.full
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


def test_a_classifier_of_several_kinds_is_not_trained(tmp_path, model, rows):
    path = tmp_path / "three"
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    classifier.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    with pytest.raises(ModelLoadError, match="must have one label: got num_labels = 3"):
        run(str(path), rows, tmp_path / "run")
