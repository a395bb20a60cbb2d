"""Rows with images: their tokens, their masks, their losses, and what is refused."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from tests.models.vision.tiny_families import TINY_FAMILIES
from tests.models.vision.tiny_world import PACKABLE, tiny
from tests.stages.stage_world import STILL, configured, distance, prepared, train_step
from tests.stages.vision.vision_rows_world import (
    CHATS,
    assistant,
    chat_rows,
    load,
    reader_of,
    seen_alone,
    user,
    write_rows,
)

from lightrft.config import ConfigError, TrainConfig
from lightrft.datasets.files import read_rows
from lightrft.datasets.preference_rows import load_preferences
from lightrft.datasets.ranked_rows import RANKED
from lightrft.datasets.row_data import spread
from lightrft.datasets.supervised_rows import load_supervised
from lightrft.datasets.types import DataError
from lightrft.engines.media.families import placeholder_ids
from lightrft.models import Actor
from lightrft.stages.rows.row_stage import RowStage
from lightrft.stages.supervised.supervised_objective import SupervisedObjective
from lightrft.strategy import get_fake_strategy

# The others take minutes.
FEW = [
    preset
    if preset in ("tiny-qwen2.5-vl", "tiny-mllama")
    else pytest.param(preset, marks=(pytest.mark.slow, pytest.mark.shard("vision")))
    for preset in TINY_FAMILIES
]


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_tokens_and_masks_are_those_of_the_processor(tmp_path, preset):
    model, encoder = tiny(preset)
    path = write_rows(tmp_path, chat_rows())
    data = load(load_supervised, path, model, encoder)
    assert "3 with images or videos" in data.summary
    marks = placeholder_ids(model.config)
    for row, (chat, names) in zip(data.rows, CHATS, strict=True):
        expected, is_trained = seen_alone(encoder, tmp_path, chat, names)
        assert row.token_ids.tolist() == expected["input_ids"][0].tolist()
        assert row.is_trained.tolist() == is_trained.tolist()
        assert not np.isin(row.token_ids[row.is_trained], marks).any()
        assert (row.shown is None) == (not names)
    last = load(load_supervised, path, model, encoder, train_on="last_assistant")
    for row, own in zip(last.rows, data.rows, strict=True):
        assert row.token_ids.tolist() == own.token_ids.tolist()
        assert row.is_trained.sum() <= own.is_trained.sum()
        assert row.is_trained[-1]
    whole = load(load_supervised, path, model, encoder, train_on="all")
    for row, (_, names) in zip(whole.rows, CHATS, strict=True):
        assert not np.isin(row.token_ids[row.is_trained], marks).any()
        if not names:
            assert row.is_trained[1:].all()


def stage_of(model, data, **changes):
    config = configured(data.rows, fused_linear_logprob=True, max_row_tokens=200, **changes)
    strategy = get_fake_strategy(STILL)
    models = prepared(strategy, Actor(copy.deepcopy(model)), config)
    return RowStage(config, strategy, models, data, data.rows, SupervisedObjective.of(config))


def slow(model, encoder, folder):
    """Loss, its gradient, and transformers' own loss, row by row from transformers' logits."""
    model, total, plain, count = copy.deepcopy(model), 0.0, 0.0, 0
    marks = torch.tensor(placeholder_ids(model.config), dtype=torch.int64)
    for chat, names in CHATS:
        given, is_trained = seen_alone(encoder, folder, chat, names)
        labels = given["input_ids"].masked_fill(~torch.from_numpy(is_trained)[None], -100)
        output = model(**given, labels=labels, use_cache=False)
        logits = output.logits[0, :-1].float().index_fill(-1, marks, float("-inf"))
        places = torch.from_numpy(np.flatnonzero(is_trained))
        logprobs = logits.log_softmax(-1)[places - 1, given["input_ids"][0, places]]
        total, count = total - logprobs.sum(), count + len(places)
        plain += output.loss.item() * len(places)
    (total / count).backward()
    gradient = {f"model.{n}": v.grad for n, v in model.named_parameters() if v.grad is not None}
    return (total / count).item(), gradient, plain / count


@pytest.mark.parametrize("preset", FEW)
def test_loss_and_gradient_are_those_of_transformers_row_by_row(tmp_path, preset):
    model, encoder = tiny(preset)
    path = write_rows(tmp_path, chat_rows())
    loss, gradient, plain = slow(model, encoder, tmp_path)
    data = load(load_supervised, path, model, encoder)
    ways = [{}, {"micro_train_batch_size": 3}]
    if preset in PACKABLE:
        ways.append({"micro_train_batch_size": 5, "packing_samples": True})
    for way in ways:
        stage = stage_of(model, data, **way)
        held_out = stage.evaluate()
        found, metrics = train_step(stage, data.rows)
        found = {name: value for name, value in found.items() if name in gradient}
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5), way
        assert held_out["eval/loss"] == pytest.approx(loss, rel=1e-5), way
        assert distance(found, gradient) <= 2e-5, way
    # transformers' own loss counts marks of images, which no policy samples, as possible tokens.
    assert plain > loss or not placeholder_ids(model.config)
    assert plain == pytest.approx(loss, rel=0.1)


def test_a_family_that_cannot_be_packed_says_so(tmp_path):
    model, encoder = tiny("tiny-mllama")
    path = write_rows(tmp_path, chat_rows())
    data = load(load_supervised, path, model, encoder)
    with pytest.raises(ConfigError, match="train without packing_samples"):
        stage_of(model, data, packing_samples=True)


def test_texts_have_their_images_where_their_marks_are(tmp_path):
    model, encoder = tiny("tiny-llava")
    rows = [
        {"prompt": "<image>what? ", "completion": "a dog", "images": "a.png"},
        {"prompt": "plain ", "completion": "text", "images": None},
    ]
    data = load(load_supervised, write_rows(tmp_path, rows), model, encoder)
    first, second = data.rows
    tokenizer = encoder.processor.tokenizer
    mark = placeholder_ids(model.config)[0]
    assert (first.token_ids == mark).sum() == 16
    assert tokenizer.decode(first.token_ids[first.is_trained]) == f"a dog{tokenizer.eos_token}"
    assert second.shown is None
    (whole,) = load(
        load_supervised,
        write_rows(tmp_path, [{"text": "see <image> there", "images": ["a.png"]}]),
        model,
        encoder,
    ).rows
    assert whole.is_trained.sum() == len(whole.token_ids) - 16 - 1
    chat = [{"prompt": "what is <image>?", "completion": "a dog", "images": ["a.png"]}]
    (turn,) = load(
        load_supervised,
        write_rows(tmp_path, chat),
        model,
        encoder,
        apply_chat_template=True,
    ).rows
    assert tokenizer.decode(turn.token_ids[turn.is_trained]) == f"a dog{tokenizer.eos_token}"


def test_answers_of_pairs_and_rankings_stand_behind_one_image(tmp_path):
    model, encoder = tiny("tiny-qwen2.5-vl")
    row = {"prompt": [user("<image>what?")], "chosen": "a dog", "rejected": "no", "images": "a.png"}
    (pair,) = load(load_preferences, write_rows(tmp_path, [row]), model, encoder).rows
    ranked = {"prompt": [user("<image>what?")], "answers": ["a dog", "no"], "ranks": [1, 2]}
    path = write_rows(tmp_path, [ranked | {"images": ["a.png"]}])
    options = {"path": path, "vocab_size": None, "reader": reader_of(model, encoder)}
    tokenizer = encoder.processor.tokenizer
    (ranking,) = RANKED.of(read_rows(path), tokenizer, TrainConfig(), **options).rows
    for answers in (pair.rows, ranking.rows):
        for answer, text in zip(answers, ("a dog", "no"), strict=True):
            chat = [user("<image>what?"), assistant(text)]
            expected, is_trained = seen_alone(encoder, tmp_path, chat, ["a"])
            assert answer.token_ids.tolist() == expected["input_ids"][0].tolist()
            assert answer.is_trained.tolist() == is_trained.tolist()
        assert answers[0].shown == answers[1].shown


GOOD = {"messages": [user("<image>one?"), assistant("yes")], "images": ["a.png"]}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"images": ["a.png", "b.png"]}, "names 1 images and 0 videos, and the row has 2 and 0"),
        ({"images": []}, "names 1 images and 0 videos, and the row has 0 and 0"),
        ({"images": ["none.png"]}, "no file .*none.png"),
        ({"images": 3}, "image 1"),
        ({"messages": [user("one?"), assistant("see <image>")]}, "an answer has the mark"),
    ],
)
def test_images_that_do_not_fit_are_named_with_file_and_row(tmp_path, changes, said):
    model, encoder = tiny("tiny-qwen2.5-vl")
    path = write_rows(tmp_path, [GOOD, GOOD | changes])
    with pytest.raises(DataError, match=rf"^{path}:2: (?!{path}).*{said}"):
        load(load_supervised, path, model, encoder)


@pytest.mark.parametrize(
    "row, said",
    [
        (
            {"prompt": "<image>?", "completion": "a", "images": ["a.png", "b.png"]},
            "do not fit.*1 places",
        ),
        ({"prompt": "<image>?", "completion": "a"}, "mark of an image|places"),
        ({"text": "<image>?"}, "mark of an image|places"),
        ({"prompt": "what?", "completion": "a", "images": ["a.png"]}, "names no place|do not fit"),
        ({"token_ids": [1, 2], "is_trained": [0, 1], "images": ["a.png"]}, "rows of token ids"),
    ],
)
def test_texts_that_name_other_images_are_refused(tmp_path, row, said):
    model, encoder = tiny("tiny-llava")
    path = write_rows(tmp_path, [row])
    with pytest.raises(DataError, match=f"{path}:1: .*({said})"):
        load(load_supervised, path, model, encoder)


def test_a_processor_that_changes_texts_is_refused():
    @dataclasses.dataclass
    class Encoded:
        request_token_ids: tuple
        token_ids: tuple

    marks, mask = frozenset({9}), np.arange(10) == 3
    short = (1, 9, 2, 5, 6, 3, 9, 2, 5, 6)
    # 7 and 8 surround features.
    long = (1, 7, 9, 9, 8, 2, 5, 6, 3, 7, 9, 8, 2, 5, 6)
    assert np.flatnonzero(spread(Encoded(short, long), mask, marks)).tolist() == [6]
    with pytest.raises(DataError, match="around an image or video otherwise"):
        spread(Encoded(short, (1, 9, 4, 5, 6, 3, 9, 2, 5, 6)), mask, marks)
    with pytest.raises(DataError, match="changes the text behind the last image"):
        spread(Encoded(short, (*long[:-1], 4)), mask, marks)
