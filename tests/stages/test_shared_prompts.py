"""Prompts of an evaluation that are trained on are counted, in every stage by one function."""

from __future__ import annotations

import json

import pytest
from tests.runs import row_options, tiny_models, write

from lightrft.config import TrainConfig
from lightrft.stages.opening import shared_prompts
from lightrft.trainer import SFTTrainer, train

LINE = "the prompts of 2 of 3 held-out {} are trained on, too"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models(tmp_path_factory.mktemp("shared"), "model") / "model")


def test_shared_prompts_are_counted_once_each():
    assert shared_prompts(["a", "b"], ["c"]) == []
    assert LINE.format("rows") in shared_prompts(["a", "b", "b"], ["b", "c", "b"])[0]


def test_fine_tuning_says_what_of_its_evaluation_it_trains_on(tmp_path, model, capsys):
    rows = write(tmp_path / "rows.jsonl", [{"prompt": p, "completion": "1"} for p in "abcd"])
    held = write(tmp_path / "held.jsonl", [{"prompt": p, "completion": "2"} for p in "abe"])
    config = TrainConfig(**row_options(model, rows, tmp_path / "run", max_steps=1, eval_data=held))
    SFTTrainer(config).train()
    assert LINE.format("rows") in capsys.readouterr().out


def test_reinforcement_says_what_of_its_evaluation_it_trains_on(tmp_path, model, capsys):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"input": text}) + "\n" for text in "abe"))
    train(
        model,
        [{"input": text} for text in "abcd"],
        lambda responses: [len(text) / 9 for text in responses],
        output_dir=str(tmp_path / "run"),
        eval_data=str(held),
        max_steps=1,
        fsdp=True,
        engine_type="hf",
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        prompt_max_len=32,
        generate_max_len=4,
        check_memory=False,
    )
    assert LINE.format("prompts") in capsys.readouterr().out
