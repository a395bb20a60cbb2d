"""TRL's RewardTrainer has the same tokens, losses and gradients, where it is right.

Runs with the group `peers` (`.ci/slow peers`). What differs is in the tests whose names begin with
`test_trl_`: each reproduces TRL's number with ours, carried out as TRL does it.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from benchmarks.peers.trl_peer import (
    TWO_BATCHES,
    read,
    require_equal,
    require_other,
    step_of,
    tiny_checkpoint,
)
from tests.stages.reward.reward_world import build_stage
from tests.stages.stage_world import STILL, train_step
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.row_data import SupervisedRow
from lightrft.strategy import get_fake_strategy

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]

PAIRS = [
    {"prompt": f"name {n}: ", "chosen": "ab " * (1 + n * n), "rejected": "abc " * (7 - 2 * n)}
    for n in range(4)
]
MARGINS = [{**each, "margin": 0.5 * n} for n, each in enumerate(PAIRS)]
CHATS = [
    {
        name: [
            {"role": "user", "content": each["prompt"]},
            {"role": "assistant", "content": each[name]},
        ]
        for name in ("chosen", "rejected")
    }
    for each in PAIRS
]
# Behind the end of a turn it writes a newline, as most templates do.
WITH_NEWLINES = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}\
{%- if m.role == 'assistant' %}{{- eos_token + '\\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def classifier(path):
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    )


@pytest.fixture
def of_trl(path, classifier, tmp_path):
    """A function of rows and options; see `step_of`."""

    def run(rows, *, tokenizer=None, **options):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
        tokenizer.padding_side = "right"
        model, trainer = copy.deepcopy(classifier), (trl.RewardTrainer, trl.RewardConfig)
        return step_of(*trainer, model, tmp_path, rows, tokenizer=tokenizer, **options)

    return run


@pytest.fixture
def ours(classifier):
    """A function of items and options; see `train_step`."""

    def run(items, **options):
        stage = build_stage(get_fake_strategy(STILL), items, model=classifier, **options)
        return train_step(stage, items)

    return run


@pytest.fixture
def rows_of(path, tmp_path):
    def run(rows, **options):
        return read(load_preferences, path, tmp_path, rows, **options)

    return run


def require_same_tokens(items, data):
    for item, theirs in zip(items, data, strict=True):
        assert item.chosen.token_ids.tolist() == theirs["chosen_ids"]
        assert item.rejected.token_ids.tolist() == theirs["rejected_ids"]


@pytest.mark.parametrize(
    "rows, options, changes",
    [
        (PAIRS, {}, {}),
        (MARGINS, {}, {"packing_samples": True}),
        (PAIRS, {"center_rewards_coefficient": 0.3}, {"centering_coef": 0.3}),
        (CHATS, {}, {}),
        (MARGINS, TWO_BATCHES, {"micro_train_batch_size": 4}),
    ],
    ids=["pairs", "margins", "centred", "conversations", "two batches"],
)
def test_rewards(of_trl, ours, rows_of, rows, options, changes):
    items, theirs = rows_of(rows), of_trl(rows, **options)
    require_same_tokens(items, theirs[0].train_dataset)
    require_equal(ours(items, **changes), theirs)


def test_pairs_that_are_too_long_are_left_out(of_trl, ours, rows_of):
    items, theirs = rows_of(PAIRS, max_row_tokens=30), of_trl(PAIRS, max_length=30)
    assert len(items) == 2
    require_same_tokens(items, theirs[0].train_dataset)
    require_equal(ours(items), theirs)


def with_last(item, *last):
    """A pair whose answers have other tokens for their last one, or none."""

    def changed(row):
        ids = torch.tensor([*row.token_ids[:-1].tolist(), *last], dtype=torch.int32).numpy()
        return SupervisedRow(ids, ids > -1)

    return replace(item, chosen=changed(item.chosen), rejected=changed(item.rejected))


def test_trl_reads_the_score_before_the_end_where_padding_is_the_end(of_trl, ours, rows_of, path):
    """It looks for the last token that has not the id of padding; ours for the last of the row."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    items, theirs = rows_of(PAIRS, tokenizer=tokenizer), of_trl(PAIRS, tokenizer=tokenizer)
    require_same_tokens(items, theirs[0].train_dataset)
    require_equal(ours([with_last(item) for item in items]), theirs)
    require_other(ours(items), theirs)


def test_trl_reads_the_score_of_a_conversation_behind_its_end(of_trl, ours, rows_of, path):
    """At the newline that a template writes there; ours where the policy ends its turn."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = WITH_NEWLINES
    items, theirs = rows_of(CHATS, tokenizer=tokenizer), of_trl(CHATS, tokenizer=tokenizer)
    assert {int(row.token_ids[-1]) for item in items for row in item.rows} == {
        tokenizer.eos_token_id
    }
    behind = [with_last(item, tokenizer.eos_token_id, ord("\n")) for item in items]
    require_same_tokens(behind, theirs[0].train_dataset)
    require_equal(ours(behind), theirs)
    require_other(ours(items), theirs)
