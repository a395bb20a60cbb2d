"""TRL's SFTTrainer has the same tokens, masks, losses and gradients, where it is right.

Runs with the group `peers` (`.ci/slow peers`). What differs is that TRL trains every token of a
conversation unless told otherwise (`assistant_only_loss`), and that it then needs {% generation %}.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.stages.supervised.supervised_world import STILL, build_stage, distance, train_step
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config import TrainConfig
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.strategy import get_fake_strategy
from lightrft.tools.model_presets import write_tiny_model

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]

WORDS = ["ab " * (1 + n * n) for n in range(4)]
PAIRS = [{"prompt": f"name {n} ", "completion": word} for n, word in enumerate(WORDS)]
TEXTS = [{"text": f"name {n} {word}"} for n, word in enumerate(WORDS)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"name {n}"},
            {"role": "assistant", "content": word},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": word[:4]},
        ]
    }
    for n, word in enumerate(WORDS)
]
# A template with what is sampled marked, as TRL needs it for assistant_only_loss.
MARKED = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if m.role == 'assistant' %}\
{%- generation %}{{- m.content + eos_token }}{%- endgeneration %}\
{%- else %}{{- m.content }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
CASES = {
    "prompts and completions": (PAIRS, {}, {}),
    "texts": (TEXTS, {}, {}),
    "all of prompts and completions": (PAIRS, {"completion_only_loss": False}, {"train_on": "all"}),
    "turns": (CHATS, {"assistant_only_loss": True}, {}),
    "all of conversations": (CHATS, {}, {"train_on": "all"}),
    "dft": (PAIRS, {"loss_type": "dft"}, {"sft_loss": "dft"}),
    "packed": (PAIRS, {"packing": True, "max_length": 64}, {"packing_samples": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "model"
    write_tiny_model(path, "tiny-qwen3", seed=1)
    return str(path)


def tokenizer_of(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = MARKED
    return tokenizer


def of_trl(model, folder, rows, **options):
    """Ids, what is trained, loss and gradient of one batch."""
    from datasets import Dataset

    given = {"max_length": None, "gradient_checkpointing": False, "bf16": False, **options}
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        **given,
    )
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(model),
    )
    batch = trainer.data_collator([*trainer.train_dataset])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradient = {f"model.{n}": p.grad for n, p in trainer.model.named_parameters()}
    return batch, loss.item(), gradient


@pytest.mark.parametrize("case", CASES)
def test_tokens_loss_and_gradient_are_those_of_trl(model, tmp_path, case):
    rows, of_theirs, of_ours = CASES[case]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(**of_ours)
    data = load_supervised(
        str(path), tokenizer_of(model), config, max_samples=9, split="train"
    ).rows
    batch, loss, gradient = of_trl(model, tmp_path, rows, **of_theirs)
    if case != "packed":
        for row, ids, labels in zip(data, batch["input_ids"], batch["labels"], strict=True):
            size = len(row.token_ids)
            assert ids[:size].tolist() == row.token_ids.tolist()
            # The first token follows nothing, whatever its label.
            assert np.array_equal(labels[1:size] != -100, row.is_trained[1:])
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stage = build_stage(get_fake_strategy(STILL), data, model=loaded, **of_ours)
    found, metrics = train_step(stage, data)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert distance(found, gradient) <= 1e-4
