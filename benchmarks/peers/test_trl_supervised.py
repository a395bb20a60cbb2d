"""TRL's SFTTrainer has the same tokens, masks, losses and gradients, where it is right.

Runs with the group `peers` (`.ci/slow peers`). What differs is in the tests whose names begin with
`test_trl_`: each reproduces TRL's number with ours, carried out as TRL does it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from benchmarks.peers.trl_peer import (
    TWO_BATCHES,
    causal,
    read,
    require_equal,
    require_other,
    step_of,
    tiny_checkpoint,
)
from tests.stages.stage_world import STILL, train_step
from tests.stages.supervised.supervised_world import build_stage
from transformers import AutoTokenizer

from lightrft.datasets.row_data import SupervisedRow
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.strategy import get_fake_strategy

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
# One that leaves the end of a turn out.
WITHOUT_END = MARKED.replace(
    "m.content + eos_token }}{%- endgeneration %}",
    "m.content }}{%- endgeneration %}{{- eos_token }}",
)
CASES = {
    "prompts and completions": (PAIRS, {}, {}),
    "texts": (TEXTS, {}, {}),
    "all of prompts and completions": (PAIRS, {"completion_only_loss": False}, {"train_on": "all"}),
    "turns": (CHATS, {"assistant_only_loss": True}, {}),
    "two batches": (
        PAIRS,
        TWO_BATCHES,
        {},
    ),
    "dft": (PAIRS, {"loss_type": "dft"}, {"sft_loss": "dft"}),
    "packed": (PAIRS, {"packing": True, "max_length": 64}, {"packing_samples": True}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("trl"))


def tokenizer_of(path, template=MARKED):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def of_trl(path, tmp_path):
    """A function of rows and options; see `step_of`."""

    def run(rows, *, tokenizer=None, **options):
        tokenizer = tokenizer or tokenizer_of(path)
        trainer = (trl.SFTTrainer, trl.SFTConfig, causal(path))
        return step_of(*trainer, tmp_path, rows, tokenizer=tokenizer, **options)

    return run


@pytest.fixture
def rows_of(path, tmp_path):
    """A function of rows and options: our rows."""
    return partial(read, load_supervised, path, tmp_path, tokenizer=tokenizer_of(path))


def ours(path, rows, **options):
    stage = build_stage(get_fake_strategy(STILL), rows, model=causal(path), **options)
    return train_step(stage, rows)


def masks_of(trainer):
    """Ids of each row of a trainer, and which of them have a label."""
    batch = trainer.data_collator([*trainer.train_dataset])
    return [
        (ids[seen].tolist(), (labels[seen] != -100).numpy())
        for ids, labels, seen in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
        )
    ]


@pytest.mark.parametrize("case", CASES)
def test_tokens_loss_and_gradient_are_those_of_trl(path, of_trl, rows_of, case):
    rows, of_theirs, of_ours = CASES[case]
    data, theirs = rows_of(rows, **of_ours), of_trl(rows, **of_theirs)
    if case != "packed":
        for row, (ids, has_label) in zip(data, masks_of(theirs[0]), strict=True):
            assert ids == row.token_ids.tolist()
            # The first token follows nothing, whatever its label.
            assert np.array_equal(has_label[1:], row.is_trained[1:])
    require_equal(ours(path, data, **of_ours), theirs)


def test_trl_trains_every_token_of_a_conversation(path, of_trl, rows_of):
    """Unless assistant_only_loss is given; ours trains what the assistant says."""
    theirs = of_trl(CHATS)
    require_equal(ours(path, rows_of(CHATS, train_on="all")), theirs)
    require_other(ours(path, rows_of(CHATS)), theirs)


def test_trl_cuts_rows_that_are_too_long(path, of_trl, rows_of):
    """Cut rows have no end; ours leaves them out and counts them."""
    theirs = of_trl(PAIRS, max_length=16)
    cut = [SupervisedRow(row.token_ids[:16], row.is_trained[:16]) for row in rows_of(PAIRS)]
    require_equal(ours(path, cut), theirs)
    assert len(rows_of(PAIRS, max_row_tokens=16)) == 2


def test_trl_trains_turns_without_the_end_that_a_template_leaves_out(path, of_trl, rows_of):
    """It warns at most; ours refuses the row with both texts."""
    tokenizer = tokenizer_of(path, WITHOUT_END)
    trainer, *_ = of_trl(CHATS, tokenizer=tokenizer, assistant_only_loss=True)
    for ids, has_label in masks_of(trainer):
        assert tokenizer.eos_token_id in ids
        assert tokenizer.eos_token_id not in np.array(ids)[has_label]
    with pytest.raises(DataError, match="generation"):
        rows_of(CHATS, tokenizer=tokenizer)
