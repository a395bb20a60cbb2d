"""Whole runs of supervised fine-tuning: what they learn, and that they continue to the bit."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from tests import runs
from tests.models import planted_kernels
from tests.ranks import run_multiprocess
from tests.runs import continued, in_ranks, interrupted, steps, tiny_models, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.supervised_rows import SupervisedRow
from lightrft.models.statements import read_statements
from lightrft.run.assembly import run_training
from lightrft.stages.supervised.supervised_inputs import last_trained
from lightrft.trainer import SFTTrainer

ANSWERS = {f"name {i}": f"word {i * 7 % 10}{chr(97 + i)}" for i in range(8)}


options = partial(runs.row_options, actor_learning_rate=3e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_models(tmp_path_factory.mktemp("sft"), "model") / "model")


@pytest.fixture
def rows(tmp_path):
    chats = (
        [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        for ask, answer in ANSWERS.items()
    )
    return write(tmp_path / "rows.jsonl", ({"messages": chat} for chat in chats))


def test_eight_rows_are_learned_until_greedy_decoding_gives_them_back(tmp_path, model, rows):
    config = TrainConfig(
        **options(
            model,
            rows,
            tmp_path / "run",
            train_batch_size=8,
            micro_train_batch_size=8,
            max_epochs=60,
            lr_scheduler="constant",
            eval_data=rows,
            best_metric="eval/logprob",
        )
    )
    summary = SFTTrainer(config).train()
    assert summary.verdict.startswith("trained: 60 of 60")
    assert summary.last_metrics["loss"] < 0.01
    assert summary.last_eval["eval/loss"] < 0.01 < 1 < summary.first_eval["eval/loss"]
    assert summary.last_eval["eval/logprob"] == -summary.last_eval["eval/loss"]
    assert (tmp_path / "run/checkpoints/best").is_dir()
    trained = AutoModelForCausalLM.from_pretrained(summary.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    for ask, answer in ANSWERS.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, tokenize=False
        )
        given = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = trained.generate(
                given,
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )[0, given.shape[1] :]
        assert tokenizer.decode(out) == answer + tokenizer.eos_token


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "packing_samples": True}])
def test_an_interrupted_run_continues_to_the_bit(tmp_path, model, rows, changes):
    settings = partial(options, model, rows, save_steps=2, **changes)
    # In the middle of the second pass over the data.
    summary = continued(SFTTrainer, tmp_path, settings, 4)
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 6)
    before, after = (steps(tmp_path / "whole")[place]["loss"] for place in (0, -1))
    assert after < before


@pytest.mark.parametrize(("changes", "rate"), [({}, 1e-5), ({"lora_rank": 2}, 1e-4)])
def test_the_stage_decides_the_learning_rate_that_nobody_gave(
    tmp_path, model, rows, capsys, changes, rate
):
    given = {"max_steps": 2, "save_steps": 1, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
    config = TrainConfig(
        **options(model, rows, tmp_path / "run", actor_learning_rate=None, **given, **changes)
    )
    interrupted(SFTTrainer, config, 2)
    said = f"actor_learning_rate = {rate}: the default of sft"
    assert said in capsys.readouterr().out
    assert TrainConfig.load(tmp_path / "run" / "config.toml").actor_learning_rate == rate
    # What was decided is kept, and there is nothing to say.
    assert SFTTrainer(config).train().num_resumed_steps == 1
    assert said not in capsys.readouterr().out
    assert [step["actor_lr"] for step in steps(tmp_path / "run")] == [rate, rate]


@pytest.mark.parametrize("end", ["<|end|>", "<|pad|>"])
def test_an_end_at_which_engines_do_not_stop_is_warned_of(model, end):
    said, statements = [], read_statements(model)
    ids = np.array([65, statements.tokenizer.convert_tokens_to_ids(end)], dtype=np.int32)
    last = last_trained(SupervisedRow(ids, np.array([False, True])))
    statements.say(said.append, last=last)
    assert bool(said) == (end == "<|pad|>")
    assert all("trained to end in '<|pad|>', and generation stops at '<|end|>'" in x for x in said)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "backend",
    [{"fsdp": True}, pytest.param({"zero_stage": 2}, marks=pytest.mark.deepspeed)],
)
def test_two_ranks_train_on_the_rows_of_one_and_continue(tmp_path, model, rows, backend):
    changes = {"micro_train_batch_size": 1, "save_steps": 2, "eval_data": rows}
    alone = options(model, rows, tmp_path / "one", **changes, fsdp=True)
    SFTTrainer(TrainConfig(**alone)).train()
    settings = options(model, rows, tmp_path / "two", **changes, **backend)
    args = ("SFTTrainer", [settings], 4)
    for (summary,) in run_multiprocess(in_ranks, 2, timeout_seconds=300, args=args):
        assert summary["num_resumed_steps"] == 2
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 7  # the evaluation before the first step, and six steps
    for expected, found in zip(one[1:], two[1:], strict=True):
        assert found["num_tokens"] == expected["num_tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert two[-1]["eval/loss"] == pytest.approx(one[-1]["eval/loss"], rel=1e-3)


def test_the_report_shows_the_run(tmp_path, model, rows):
    from lightrft.tools.report.page import render_report

    config = TrainConfig(**options(model, rows, tmp_path / "run", max_steps=2))
    assert SFTTrainer(config).train().num_steps == 2
    page = render_report(tmp_path / "run")
    assert "perplexity" in page
    assert "trained_share" in page
    assert "Loss" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_kl_coef": 0.1}, "init_kl_coef is no option of lightrft sft"),
        ({"train_batch_size": 16}, "has 8 usable rows, less than one step takes"),
        ({"micro_train_batch_size": 3}, "train_batch_size must be a multiple of"),
        ({"prompt_data": None}, "--prompt_data is missing"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, model, rows, changes, said):
    with pytest.raises(ConfigError, match=said):
        SFTTrainer(TrainConfig(**options(model, rows, tmp_path / "run", **changes))).train()


def test_reinforcement_refuses_options_of_supervised_training(tmp_path, model, rows):
    config = TrainConfig(
        **options(model, rows, tmp_path / "run", train_on="all", max_epochs=1, reward_fn=("gsm8k",))
    )
    with pytest.raises(ConfigError, match="train_on is an option of lightrft sft"):
        run_training(config)


@pytest.mark.parametrize(
    ("kernel", "packs", "line"),
    [
        ("without_argument", True, "packed, one kernel for all rows: varlen_attn, tried here with"),
        ("mixing", True, "packed, one call for each row: varlen_attn computes others than plain"),
        ("raising", None, "padded rows: varlen_attn fails with grouped heads: RuntimeError: Numbe"),
    ],
)
def test_the_way_through_attention_is_said_and_kept(
    tmp_path, model, rows, capsys, monkeypatch, kernel, packs, line
):
    planted_kernels.plant(monkeypatch, getattr(planted_kernels, kernel))
    given = {"packing_samples": packs, "bf16": True, "max_steps": 1, "fsdp": True}
    SFTTrainer(TrainConfig(**options(model, rows, tmp_path / "run", **given))).train()
    lines = capsys.readouterr().out.splitlines()
    (said,) = [text for text in lines if text.startswith("attention: ")]
    assert said.startswith(f"attention: {line}")
    start = json.loads((tmp_path / "run/run.json").read_text())
    assert f"attention: {start['attention']}" == said
