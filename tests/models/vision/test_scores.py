"""Rows with pictures or sounds score as they do alone, padded and packed, with their gradients."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import transformers as hf
from tests.models.audio import sound_world
from tests.models.batches import relative_norm
from tests.models.vision.tiny_families import TINY_FAMILIES
from tests.models.vision.tiny_world import (
    LINEAR,
    MROPE,
    PACKABLE,
    Batch,
    pack,
    scored,
    set_window,
    tiny,
    tower_of,
)

from lightrft.engines.media.families import family_of, placeholder_ids
from lightrft.engines.media.inputs import token_types
from lightrft.engines.media.media import RowMedia
from lightrft.models.actor import Actor
from lightrft.models.layout import TokenLayout
from lightrft.models.types import LayoutRefusedError
from lightrft.models.vision.forward import vision_inputs

LOGPROB = 1e-5
AUDIO = "tiny-qwen2-audio"
MEDIA = [*TINY_FAMILIES, AUDIO]
CAN_PACK = [*PACKABLE, AUDIO]


def world(preset):
    """A model of a family, its encoder, and rows with and without media."""
    if preset == AUDIO:
        model, encoder = sound_world.tiny()
        return model, encoder, sound_world.batch_of(model, encoder)
    model, encoder = tiny(preset)
    return model, encoder, Batch(model, encoder)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_rows(actor, batch, alone):
    """Logprobs of the batch's rows, which are those of each row alone."""
    found = batch.of_rows(scored(actor, batch))
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, atol=LOGPROB, rtol=0)
    return found


for_every_family = pytest.mark.parametrize("preset", MEDIA)


@for_every_family
def test_rows_score_as_they_do_alone_padded_and_packed(preset):
    model, _, batch = world(preset)
    weights = [torch.randn(len(r) - s) for r, s in zip(batch.rows, batch.starts, strict=True)]
    alone = batch.each_alone(model)
    sum((a * w).sum() for a, w in zip(alone, weights, strict=True)).backward()
    alone = [a.detach() for a in alone]
    expected = gradients(model)
    model.zero_grad()
    actor = Actor(model)
    for is_packed in (False, True):
        if is_packed and preset not in CAN_PACK:
            with pytest.raises(LayoutRefusedError, match="train without packing_samples"):
                actor.pack_samples()
            continue
        if is_packed:
            pack(actor)
        found = check_rows(actor, batch, alone)
        sum((f * w).sum() for f, w in zip(found, weights, strict=True)).backward()
        assert relative_norm(gradients(model), expected) < 1e-5
        model.zero_grad()


@contextmanager
def trunk_given(model, change):
    """Changes the arguments that the trunk is called with; the list gets what they were."""
    seen = []

    def hook(module, args, given):
        seen.append(given)
        return args, {**given, **change(given)}

    handle = model.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def one_sequence(given):
    """Fault: the bounds between rows are lost."""
    bounds = given["sequence_bounds"]
    ends = (0, bounds.offsets[-1])
    lost = replace(bounds, offsets=ends, offsets_tensor=torch.tensor(ends, dtype=torch.int32))
    return {"sequence_bounds": lost}


@pytest.mark.parametrize("preset", CAN_PACK)
@torch.no_grad()
def test_the_test_sees_packed_rows_without_bounds(preset):
    model, _, batch = world(preset)
    alone = batch.each_alone(model)
    actor = Actor(model)
    pack(actor)
    with trunk_given(model, one_sequence):
        first, *later = batch.of_rows(scored(actor, batch))
        with pytest.raises(AssertionError):
            check_rows(actor, batch, alone)
    torch.testing.assert_close(first, alone[0], atol=LOGPROB, rtol=0)
    for found, other in zip(later, alone[1:], strict=True):
        assert (found - other).abs().max() > 0.1
    check_rows(actor, batch, alone)


def gap_of_plain_stream(model, batch, alone, planted):
    """How far off later rows of a stream are that transformers lays out by positions alone."""
    layout = TokenLayout.packed(batch.token_ids, batch.attention_mask, batch.scored)
    given = vision_inputs(model.base_model, batch.family, layout, batch.media)
    if batch.family.takes_types:
        types = token_types(layout.rows_of_tokens, batch.media.prompts)
        given[batch.family.token_types] = layout.place(types)
    logits = model(input_ids=layout.input_ids, **{**given, "use_cache": False, **planted}).logits
    rows = logits.split([len(row) for row in batch.rows], dim=1)
    found = [batch.response_logprobs(row, i) for i, row in enumerate(rows)]
    return max(float((f - a).abs().max()) for f, a in zip(found[1:], alone[1:], strict=True))


# Transformers' own forward pass mixes packed rows in layers of linear attention.
@pytest.mark.parametrize("preset", [name for name in CAN_PACK if name not in LINEAR])
@torch.no_grad()
def test_packed_rows_do_not_mix_by_a_cache_or_a_mask_of_ones(preset):
    """Both mix the rows where bounds are read off positions; here attention is told the bounds."""
    model, _, batch = world(preset)
    alone = batch.each_alone(model)
    num_tokens = [len(row) for row in batch.rows]
    mask = {"attention_mask": torch.ones(1, sum(num_tokens), dtype=torch.int64)}
    # What transformers' own forward pass takes by default or is often given.
    mixing = [mask, {"use_cache": True} | mask]
    # Which makes its masks without looking at the cache, and from transformers 5.24 on mixes rows.
    if preset != "tiny-gemma3":
        mixing.append({"use_cache": True})
        assert gap_of_plain_stream(model, batch, alone, {}) < LOGPROB
    assert all(gap_of_plain_stream(model, batch, alone, planted) > 0.3 for planted in mixing)
    actor = Actor(model)
    pack(actor)
    for planted in mixing:
        with trunk_given(model, lambda _, planted=planted: planted) as seen:
            check_rows(actor, batch, alone)
        assert seen[0]["use_cache"] is False
        assert "attention_mask" not in seen[0]
        assert seen[0]["sequence_bounds"].offsets == (0, *accumulate(num_tokens))


@for_every_family
def test_the_test_sees_media_of_the_wrong_row(preset):
    model, _, batch = world(preset)
    first, _, last = batch.media.prompts
    # The tensors of the one with the tokens of the other: a plain exchange raises, see below.
    alone = batch.alone(model, 0)
    moved = type(first)(
        first.token_ids,
        first.request_token_ids,
        first.token_types,
        {n: 5 - 5 * t if t.is_floating_point() else t for n, t in first.tensors.items()},
        first.kinds,
    )
    found = scored(Actor(model), batch, RowMedia((moved, None, last)))[0][batch.scored[0]]
    assert (found - alone).abs().max() > 1e-3


def test_media_of_another_prompt_are_refused():
    model, _, batch = world("tiny-llava")
    first, _, last = batch.media.prompts
    with pytest.raises(ValueError, match=r"row 0 does not begin with the prompt its media"):
        scored(Actor(model), batch, RowMedia((last, None, first)))


def test_a_family_that_does_not_fit_is_refused_with_the_reason():
    config = hf.Qwen2_5OmniConfig
    # Of the type alone: some configurations need packages of their own.
    named = hf.PretrainedConfig()
    named.model_type = config.model_type
    reason = "its checkpoint holds models that speak"
    with pytest.raises(ValueError, match=rf"'{config.model_type}' are not supported \({reason}"):
        family_of(named)


@pytest.mark.parametrize("preset", MROPE)
def test_places_by_count_alone_would_be_wrong(preset):
    model, _, batch = world(preset)
    given = batch.arguments(0)
    length = given["input_ids"].shape[1]
    wrong = model(**given, position_ids=torch.arange(length)[None], use_cache=False).logits
    distance = batch.response_logprobs(wrong, 0) - batch.alone(model, 0)
    assert distance.abs().max() > 0.05


@for_every_family
def test_a_rank_without_media_runs_the_tower_without_effect(preset):
    model, encoder, batch = world(preset)
    text = Batch(model, encoder, prompts=[batch.prompts[1]])
    alone = text.alone(model, 0)
    alone.sum().backward()
    alone = alone.detach()
    expected = gradients(model)
    model.zero_grad()
    actor = Actor(model)
    # Ranks with media and ranks without have to wait for the same gradients.
    scored(actor, batch)[batch.scored].sum().backward()
    reached = set(gradients(model))
    model.zero_grad()
    calls = []
    tower_of(model).register_forward_hook(lambda *_: calls.append(1))
    for kind in batch.family.kinds:
        present = RowMedia((None,), encoder.blanks([kind]))
        found = text.of_rows(scored(actor, text, present))[0]
        torch.testing.assert_close(found, alone, atol=LOGPROB, rtol=0)
        found.sum().backward()
        seen = gradients(model)
        assert relative_norm(seen, expected) < 1e-5
        assert not any(seen[name].any() for name in seen.keys() - expected.keys())
        assert set(seen) == reached
        model.zero_grad()
    assert len(calls) == len(batch.family.kinds)


@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-gemma3"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_placeholder_in_a_response_is_a_token_like_others(preset, is_packed):
    model, _, batch = world(preset)
    mark = placeholder_ids(model.config)[0]
    for i, start in enumerate(batch.starts):
        batch.rows[i][start + 3] = mark
        batch.token_ids[i, start + 3] = mark
    safe = model.get_input_embeddings()
    alone = []
    for i in range(len(batch.rows)):
        given = batch.arguments(i)
        ids = given["input_ids"].clone()
        given["input_ids"] = torch.where(
            (ids == mark) & (torch.arange(ids.shape[1]) >= batch.starts[i]), 0, ids
        )
        hook = safe.register_forward_pre_hook(lambda module, args, ids=ids: (ids,))
        alone.append(batch.response_logprobs(model(**given, use_cache=False).logits, i))
        hook.remove()
    actor = Actor(model)
    if is_packed:
        pack(actor)
    for one, other in zip(batch.of_rows(scored(actor, batch)), alone, strict=True):
        torch.testing.assert_close(one, other, atol=LOGPROB, rtol=0)


def test_selected_rows_share_the_tensors_of_their_prompt():
    first, text, last = world("tiny-qwen2.5-vl")[2].media.prompts
    media = RowMedia((first,) * 8 + (text,) + (last,) * 8)
    part = media[6:11]
    assert [p and p.tensors["pixel_values"].data_ptr() for p in part.prompts] == [
        p and p.tensors["pixel_values"].data_ptr() for p in (first, first, None, last, last)
    ]
    assert part.kinds == {"image"}


@pytest.mark.parametrize("window", [2, 3, 8, 24])
def test_images_beyond_the_sliding_window_score_as_in_transformers(window):
    """Of four tokens each: an image sees itself only as far back as the window goes."""
    model, encoder = tiny("tiny-gemma3")
    set_window(model, window)
    batch = Batch(model, encoder)
    assert max(map(len, batch.rows)) > window
    with torch.no_grad():
        alone = batch.each_alone(model)
        actor = Actor(model)
        for is_packed in (False, True):
            if is_packed:
                pack(actor)
            check_rows(actor, batch, alone)
