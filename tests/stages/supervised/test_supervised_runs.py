"""Whole runs of supervised fine-tuning: what they learn, decide and say."""

import json

import numpy as np
import pytest
import torch
from tests.models import planted_kernels
from tests.runs import interrupted, steps, write
from tests.stages.row_stages import options, run, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config import TrainConfig
from lightrft.datasets.row_data import SupervisedRow
from lightrft.models.statements import read_statements
from lightrft.stages.rows.row_inputs import last_trained
from lightrft.trainer import SFTTrainer

ANSWERS = {f"name {i}": f"word {i * 7 % 10}{chr(97 + i)}" for i in range(8)}


def chat(ask, *answers):
    return [
        {"role": "user", "content": ask},
        *({"role": "assistant", "content": each} for each in answers),
    ]


@pytest.mark.full
def test_eight_rows_are_learned_until_greedy_decoding_gives_them_back(tmp_path, models):
    rows = write(tmp_path / "rows.jsonl", ({"messages": chat(*item)} for item in ANSWERS.items()))
    changes = {"train_batch_size": 8, "micro_train_batch_size": 8, "max_epochs": 60}
    changes |= {"actor_learning_rate": 3e-3, "lr_scheduler": "constant"}
    changes |= {"eval_data": rows, "best_metric": "eval/logprob"}
    summary = run("sft", models, rows, tmp_path / "run", **changes)
    assert summary.verdict.startswith("trained: 60 of 60")
    assert summary.last_metrics["loss"] < 0.01
    assert summary.last_eval["eval/loss"] < 0.01 < 1 < summary.first_eval["eval/loss"]
    assert summary.last_eval["eval/logprob"] == -summary.last_eval["eval/loss"]
    assert (tmp_path / "run/checkpoints/best").is_dir()
    trained = AutoModelForCausalLM.from_pretrained(summary.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    for ask, answer in ANSWERS.items():
        asked = tokenizer.apply_chat_template(
            chat(ask), add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.no_grad():
            out = trained.generate(asked, max_new_tokens=20, do_sample=False)
        assert tokenizer.decode(out[0, asked.shape[1] :]) == answer + tokenizer.eos_token


@pytest.mark.parametrize("changes, rate", [({}, 1e-5), ({"lora_rank": 2}, 1e-4)])
def test_the_stage_decides_the_learning_rate_that_nobody_gave(
    tmp_path, models, capsys, changes, rate
):
    given = {"max_steps": 2, "save_steps": 1, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
    settings = options("sft", models, write_rows(tmp_path), tmp_path / "run", **given)
    config = TrainConfig(**{**settings, "actor_learning_rate": None, **changes})
    interrupted(SFTTrainer, config, 2)
    said = f"actor_learning_rate = {rate}: the default of sft"
    assert said in capsys.readouterr().out
    assert TrainConfig.load(tmp_path / "run/config.toml").actor_learning_rate == rate
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


def run_with(kernel, folder, models, monkeypatch, capsys, **options):
    """The lines of a run with a planted kernel, and what is said of attention."""
    planted_kernels.plant(monkeypatch, getattr(planted_kernels, kernel))
    run("sft", models, write_rows(folder), folder / "run", bf16=True, max_steps=1, **options)
    lines = capsys.readouterr().out.splitlines()
    (said,) = [text for text in lines if text.startswith("attention: ")]
    return lines, said


@pytest.mark.parametrize(
    "kernel, packs, line",
    [
        ("without_argument", True, "packed, one kernel for all rows: varlen_attn, tried here with"),
        ("mixing", True, "packed, one call for each row: varlen_attn computes others than plain"),
        ("raising", None, "padded rows: varlen_attn fails with grouped heads: RuntimeError: Numbe"),
    ],
)
def test_the_way_through_attention_is_said_and_kept(
    tmp_path, models, capsys, monkeypatch, kernel, packs, line
):
    options = {"packing_samples": packs, "fsdp": True}
    _, said = run_with(kernel, tmp_path, models, monkeypatch, capsys, **options)
    assert said.startswith(f"attention: {line}")
    start = json.loads((tmp_path / "run/run.json").read_text())
    assert f"attention: {start['attention']}" == said


@pytest.mark.parametrize("kernel", ["with_argument", "aligning_starts"])
def test_prefixes_are_shared_where_the_kernel_of_packed_rows_takes_them(
    tmp_path, models, capsys, monkeypatch, kernel
):
    options = {"packing_samples": True, "shared_prefix": "auto"}
    lines, said = run_with(kernel, tmp_path, models, monkeypatch, capsys, **options)
    is_shared = kernel == "with_argument"
    assert said.endswith("; shared prefixes once") == is_shared
    why = "shared_prefix = off: one call for each row would be slower: varlen_attn computes others"
    assert sum(text.startswith(why) for text in lines) == (not is_shared)
