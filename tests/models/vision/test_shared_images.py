"""Rows that begin with the same ids and images: computed once, and as each row alone."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.models import planted_prefixes
from tests.models.all_types import types
from tests.models.batches import relative_norm
from tests.models.vision.test_derived_families import CONTEXT, READ, world as derived_world
from tests.models.vision.test_scores import CAN_PACK, gradients, trunk_given, world
from tests.models.vision.tiny_world import MROPE, Batch, image, pack, prompt, scored, tiny

from lightrft.engines.media import inputs
from lightrft.engines.media.media import LaterImages, Media, RowMedia
from lightrft.models.actor import Actor
from lightrft.models.layout import LayoutPolicy
from lightrft.models.shared_prefix import Sharing, find_prefixes
from lightrft.models.types import LayoutRefusedError
from lightrft.models.vision import forward
from lightrft.models.vision.proof import prove_media

MIN = 3


def siblings(model, encoder, first, text, last):
    """Samples of prompts, not sorted by prompt; two prompts have equal ids and other images."""
    negative = {n: -t if t.is_floating_point() else t for n, t in first.tensors.items()}
    (span,) = first.spans
    other = replace(first, tensors=negative, spans=(replace(span, tensors=negative),))
    prompts = [first, last, other, first, text, last, first, other, text]
    batch = Batch(model, encoder, prompts=prompts)
    start = batch.starts[0]
    # A branch of a response.
    for each in (batch.rows[3], batch.token_ids[3]):
        each[start : start + 4] = batch.rows[0][start : start + 4]
    return batch


def batch_of(preset):
    model, encoder, few = world(preset)
    return model, siblings(model, encoder, *few.prompts)


def upstream_of(batch):
    generator = torch.Generator().manual_seed(5)
    lengths = (len(row) - start for row, start in zip(batch.rows, batch.starts, strict=True))
    return [torch.randn(length, generator=generator) for length in lengths]


def backward(values, upstream):
    sum((value * weights).sum() for value, weights in zip(values, upstream, strict=True)).backward()


def slow(model, batch, upstream):
    """Logprobs and gradients of rows, each by transformers' own pass in the model's dtype."""
    values = []
    for i in range(len(batch.rows)):
        arguments = {
            n: v.to(model.dtype) if v.is_floating_point() else v
            for n, v in batch.arguments(i).items()
        }
        start = batch.starts[i]
        logits = model(**arguments, use_cache=False).logits[0, start - 1 : -1]
        forbidden = torch.tensor(inputs.placeholder_ids(batch.config), dtype=torch.int64)
        logprobs = logits.index_fill(-1, forbidden, float("-inf")).log_softmax(-1)
        values.append(logprobs.gather(-1, batch.rows[i][start:, None])[:, 0])
    backward(values, upstream)
    return [value.detach() for value in values], gradients(model)


def sharing(model):
    actor = Actor(model)
    pack(actor)
    actor.share_prefixes(MIN)
    return actor


def errors(model, batch, *, recomputes=False):
    """Compare shared rows with each row alone in float64.

    Returns the largest difference of a logprob, that of the gradient, and its bound: twice what
    rows alone have in float32.
    """
    upstream = upstream_of(batch)
    exact_model = copy.deepcopy(model).double()
    exact_model.set_experts_implementation("eager")  # the grouped product takes no float64
    exact, expected = slow(exact_model, batch, upstream)
    rounding = relative_norm(slow(copy.deepcopy(model), batch, upstream)[1], expected)
    actor = sharing(copy.deepcopy(model))
    if recomputes:
        actor.gradient_checkpointing_enable()
        actor.train()
    values = batch.of_rows(scored(actor, batch))
    backward(values, upstream)
    largest = max(float((v - e).detach().abs().max()) for v, e in zip(values, exact, strict=True))
    return largest, relative_norm(gradients(actor.model), expected), max(1e-6, 2 * rounding)


def require_equal(model, batch, **how):
    logprobs, gradient, bound = errors(model, batch, **how)
    assert logprobs < 1e-5
    assert gradient <= bound


@pytest.mark.parametrize("preset", CAN_PACK)
def test_rows_of_one_image_are_those_alone_in_float64(preset):
    require_equal(*batch_of(preset))


@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-gemma3"])
def test_recomputed_rows_of_one_image_are_those_alone(preset):
    require_equal(*batch_of(preset), recomputes=True)


@pytest.mark.cover(4)
@pytest.mark.parametrize("model_type", READ)
def test_rows_of_one_image_are_those_alone_in_models_without_a_row(model_type):
    model, encoder, few = derived_world(model_type)
    batch = siblings(model, encoder, *few.prompts)
    upstream = upstream_of(batch)
    alone, expected = slow(model, batch, upstream)
    model.zero_grad()
    if types.examine_images(model_type).outcome != types.PACKED:
        return
    values = batch.of_rows(scored(sharing(model), batch))
    backward(values, upstream)
    assert relative_norm(gradients(model), expected) < 1e-5
    for value, one in zip(values, alone, strict=True):
        torch.testing.assert_close(value, one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("preset", CAN_PACK)
@torch.no_grad()
def test_the_tower_sees_each_image_once(preset):
    model, batch = batch_of(preset)
    actor = sharing(model)
    with trunk_given(model, lambda given: {}) as seen:
        scored(actor, batch)
    pixels = {name for name in batch.family.kinds.values() if name in seen[0]}
    first, last, other = batch.prompts[:3]
    for name in pixels:
        parts = [p.tensors[name] for p in (first, last, other)]
        expected = batch.family.join(first.axes.get(name, 0), parts)
        assert torch.equal(seen[0][name].float(), expected.float())
    assert pixels


def shift_axes(monkeypatch):
    """Positions of every row with media after the first are one too large."""
    right = forward.axes_of_rows

    def shifted(*rows):
        first, *later = right(*rows)
        return [first, *(axes + torch.arange(axes.shape[1]).clamp(max=1) for axes in later)]

    monkeypatch.setattr(forward, "axes_of_rows", shifted)


def take_another_image(monkeypatch):
    """Equal ids are taken for equal images."""
    right = inputs.media_numbers

    def equal(rows, prompts):
        return [numbers.clamp(max=1) for numbers in right(rows, prompts)]

    monkeypatch.setattr(inputs, "media_numbers", equal)


FAULTS = {**planted_prefixes.FAULTS, "another image of equal ids": take_another_image}


@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-gemma3", "tiny-llava"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_mistakes_are_found(preset, fault, monkeypatch):
    model, batch = batch_of(preset)
    assert errors(model, batch)[1] <= 2e-6
    plant = FAULTS[fault]
    if preset in MROPE and plant is planted_prefixes.shift_positions:
        plant = shift_axes
    plant(monkeypatch)
    logprobs, gradient, _ = errors(model, batch)
    assert gradient > 1e-3
    assert (logprobs > 1e-3) == (fault in planted_prefixes.SEEN or plant is take_another_image)


@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-gemma3"])
@pytest.mark.parametrize("fault", [take_another_image, planted_prefixes.keep_a_stale_prefix])
def test_a_model_that_would_mix_rows_is_refused_before_the_first_step(preset, fault, monkeypatch):
    model, encoder = tiny(preset)
    actor = Actor(model)
    proof = prove_media(actor, CONTEXT, encoder)
    pack(actor)
    actor.share_prefixes(MIN)
    proof.require_sharing()
    assert actor.layout_policy.min_shared_tokens == MIN
    fault(monkeypatch)
    with pytest.raises(LayoutRefusedError, match=r"mixes rows with images that begin alike: max"):
        proof.require_sharing()


def lay_out(batch, routes=None):
    return LayoutPolicy(packs_samples=True, min_shared_tokens=1).lay_out(
        batch.token_ids, batch.attention_mask, batch.scored, routes=routes, media=batch.media
    )


def test_media_are_shared_whole_or_not_at_all():
    _, batch = batch_of("tiny-qwen2.5-vl")
    first, last = batch.prompts[:2]
    (one,), (two,) = first.spans, last.spans
    layout = lay_out(batch)
    start = batch.starts[0]
    # Another image has the ids of the first. The template before it is that of all, and too short.
    assert one.start == two.start == 2
    assert layout.num_shared.tolist()[:4] == [0, 0, 0, start + 4]
    assert layout.num_shared.tolist()[5:] == [batch.starts[1], start, start, batch.starts[4]]
    # Recorded experts that differ in an image.
    routes = torch.zeros(*batch.token_ids.shape, 2, dtype=torch.uint8)
    routes[6, one.start + 2, 1] = 1
    assert lay_out(batch, routes).num_shared.tolist()[6] == 0
    assert lay_out(batch, routes).num_shared.tolist()[3] == start + 4


def test_tokens_before_other_media_are_shared():
    ids = torch.arange(12).expand(5, 12).clone()
    ids[4, 3] = 99
    media = torch.zeros_like(ids)
    for row, number in enumerate((1, 2, 1, 1, 1)):
        media[row, 4:7] = number
    media[:, 9:11] = torch.tensor([3, 3, 3, 4, 3])[:, None]
    ids[2, 10] = 98
    for padding in (0, 2):
        # Left padding moves columns, not tokens.
        rows, numbers = (F.pad(each, (padding, 0)) for each in (ids, media))
        is_real = F.pad(torch.ones_like(ids, dtype=torch.bool), (padding, 0))
        shared = find_prefixes(rows, is_real, Sharing(1, None, numbers))
        # The third row differs within an image.
        assert shared[1].tolist() == [0, 4, 9, 9, 3]


def test_inputs_that_cannot_be_told_apart_are_shared_with_their_whole_prompt():
    model, batch = batch_of("tiny-qwen2.5-vl")
    first, text = batch.prompts[0], batch.prompts[4]
    unmarked = replace(first, spans=())
    copied = replace(unmarked, tensors={n: t.clone() for n, t in first.tensors.items()})
    few = Batch(model, None, prompts=[unmarked, copied, first, text])
    start = few.starts[0]
    assert lay_out(few).num_shared.tolist()[:2] == [0, start]
    routes = torch.zeros(*few.token_ids.shape, 2, dtype=torch.uint8)
    routes[1, start - 1, 0] = 1
    assert lay_out(few, routes).num_shared.tolist()[1] == 0


@pytest.fixture
def branches():
    """Rows of an episode: images behind the prompt, a branch with another of the same size."""
    model, encoder = tiny("tiny-qwen2.5-vl")
    start = encoder.encode(prompt(encoder, "How many?", 1), Media({"image": [image(84, 84)]}))
    said = prompt(encoder, "And now?", 1)
    pieces = {seed: (image(56, 84, seed),) for seed in (1, 2, 3)}
    sizes = len(encoder.encode(said, Media({"image": pieces[1]})).token_ids)

    def later(first, seed):
        return LaterImages(first, 0, said, pieces[seed])

    def row(*seeds):
        ids, images, place = [*start.token_ids, 40, 41, 42], [], len(start.token_ids) + 3
        for seed in seeds:
            images.append(later(place, seed))
            ids += [*encoder.kept(said, images[-1].media).token_ids, 43, 44]
            place += sizes + 2
        return encoder.row(ids, start, images)

    prompts = [row(1), row(1, 2), row(3), row(1, 2), row(1, 3), start]
    return model, Batch(model, encoder, prompts=prompts), sizes


def test_branches_share_the_images_before_they_part(branches):
    model, batch, size = branches
    start, second = (batch.prompts[0].spans[i].start for i in (0, 1))
    assert [len(p.spans) for p in batch.prompts] == [2, 3, 2, 3, 3, 1]
    assert start < second
    third = batch.prompts[1].spans[2].start
    assert third == second + size + 2
    shared = lay_out(batch).num_shared.tolist()
    assert shared[:5] == [0, shared[1], second, batch.starts[1], third]
    assert shared[1] >= batch.starts[0] - 2
    require_equal(model, batch)


def test_rows_without_an_image_run_the_tower_beside_shared_ones():
    model, batch = batch_of("tiny-qwen2.5-vl")
    encoder = tiny("tiny-qwen2.5-vl")[1]
    text = batch.prompts[4]
    alone = Batch(model, encoder, prompts=[text, text])
    expected = [each.detach() for each in alone.each_alone(model)]
    actor = sharing(model)
    present = RowMedia((None, None), encoder.blanks(["image"]))
    for one, other in zip(alone.of_rows(scored(actor, alone, present)), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
