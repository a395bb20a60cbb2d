"""The embedded engine samples prompts with images as the trainer scores them."""

from dataclasses import replace

import pytest
from tests.engines.altered_engines import embedded
from tests.engines.media_requests import (
    after_answer,
    check_lists_of_a_strategy,
    logprob_error,
    requests_of,
    video_prompt,
)
from tests.models.vision.tiny_families import TINY_FAMILIES, write_tiny_vision_model
from tests.models.vision.tiny_world import LINEAR, Batch, image, prompt, set_window, tiny, tower_of

from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.media import Media
from lightrft.engines.types import (
    EngineConfig,
    GenerationRequest,
    MultiModalInputs,
    SamplingParams,
    Vocabulary,
)
from lightrft.models.actor import Actor

for_every_family = pytest.mark.parametrize("preset", TINY_FAMILIES)


@for_every_family
def test_samples_score_as_the_trainer_scores_them(preset):
    model, encoder = tiny(preset)
    batch = Batch(model, encoder)
    engine = embedded(model)
    params = SamplingParams(max_tokens=9, min_tokens=5, n=2, seed=4)
    calls = []
    tower = tower_of(engine.native)
    tower.register_forward_hook(lambda *_: calls.append(1))
    completions = engine.generate(requests_of(batch.prompts), params)
    by_length = preset in ("tiny-gemma3", "tiny-mllama", *LINEAR)
    assert len(calls) <= (2 if by_length else 1)
    forbidden = set(placeholder_ids(model.config))
    prompts = [p for p in batch.prompts for _ in range(2)]
    for item, p in zip(completions, prompts, strict=True):
        assert item.prompt_token_ids == (p if isinstance(p, tuple) else p.token_ids)
        assert not forbidden & set(item.output_token_ids)
    # Linear attention is computed token by token here, and by the trainer in chunks.
    bound = 3e-5 if preset in LINEAR else 1e-5
    assert logprob_error(Actor(model), encoder, batch.prompts, completions, n=2) < bound


def test_places_of_media_behind_the_ids_of_the_tokenizer_are_not_sampled_either():
    model, _ = tiny("tiny-qwen2-vl")
    vocabulary = Vocabulary(num_tokens=min(placeholder_ids(model.config)))
    engine = HFEngine(EngineConfig("hf", "", vocabulary=vocabulary), module=model)
    (made,) = engine.generate(requests_of([(1, 2)]), SamplingParams(max_tokens=9, min_tokens=9))
    assert max(made.output_token_ids) < vocabulary.num_tokens


@for_every_family
def test_a_placeholder_in_a_text_beside_pictures_is_text(preset):
    """A text of other people's making stops no run, and scores as the trainer scores it."""
    model, encoder = tiny(preset)
    words = f"what is {encoder.marks['image']} ?"
    forged = prompt(encoder, words)
    ids = tuple(encoder.processor.tokenizer(forged, add_special_tokens=False)["input_ids"])
    assert encoder.processor.tokenizer.convert_tokens_to_ids(encoder.marks["image"]) in ids
    prompts = [ids, Batch(model, encoder).prompts[0]]
    engine = embedded(model)
    params = SamplingParams(max_tokens=6, min_tokens=5, seed=4)
    if preset == "tiny-mllama":
        with pytest.raises(ValueError, match="request 0 has token ids outside the vocabulary"):
            engine.generate(requests_of(prompts), params)
        return
    completions = engine.generate(requests_of(prompts), params)
    assert logprob_error(Actor(model), encoder, prompts, completions) < 1e-5


@for_every_family
def test_requests_with_other_numbers_of_media_are_named(tmp_path, preset):
    write_tiny_vision_model(tmp_path, preset)
    engine = HFEngine(EngineConfig("hf", str(tmp_path)))
    _, encoder = tiny(preset)
    picture = image(84, 84).decode()
    for places, given in ((0, 1), (2, 1), (1, 2)):
        text = prompt(encoder, "?", places)
        media = MultiModalInputs(images=(picture,) * given)
        request = GenerationRequest((), 7, prompt_text=text, multi_modal=media)
        with pytest.raises(ValueError, match=rf"request 7: .*{places} places .* {given} images"):
            engine.generate([request], SamplingParams(max_tokens=1))
    if preset in ("tiny-llava", "tiny-llava-onevision"):
        request = GenerationRequest(
            (), 7, prompt_text="see <image>", multi_modal=MultiModalInputs(images=(picture,))
        )
        with pytest.raises(ValueError, match="request 7 ends with a medium"):
            engine.generate([request], SamplingParams(max_tokens=1))


def test_raw_images_are_read_by_the_model_s_own_processor(tmp_path):
    write_tiny_vision_model(tmp_path, "tiny-qwen2.5-vl")
    engine = HFEngine(EngineConfig("hf", str(tmp_path)))
    _, encoder = tiny("tiny-qwen2.5-vl")
    check_lists_of_a_strategy(engine, encoder)
    text, picture = prompt(encoder, "How many?", 1), image(84, 84)
    encoded = encoder.encode(text, Media({"image": [picture]}))
    params = SamplingParams(max_tokens=4, seed=1)
    raw = GenerationRequest(
        encoded.request_token_ids,
        prompt_text=text,
        multi_modal=MultiModalInputs(images=(picture.decode(),)),
    )
    (found,) = engine.generate([raw], params)
    (expected,) = engine.generate([GenerationRequest((), encoded=encoded)], params)
    assert found == expected
    assert found.prompt_token_ids == encoded.token_ids
    broken = GenerationRequest(
        encoded.request_token_ids, prompt_text=text, multi_modal=MultiModalInputs(images=(b"x",))
    )
    with pytest.raises(MediaError, match="image 1 of request 0 is no image"):
        engine.generate([broken], params)


def test_a_model_of_text_refuses_images(tiny_model):
    engine = embedded(tiny_model())
    request = GenerationRequest((1, 2), multi_modal=MultiModalInputs(images=(b"",)))
    with pytest.raises(ValueError, match="the hf engine reads text only"):
        engine.generate([request], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "preset",
    ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-internvl", "tiny-llava-onevision"],
)
def test_videos_score_as_the_trainer_scores_them(preset):
    """Also those that last longer than they are wide: the text lies behind them."""
    model, encoder = tiny(preset)
    # This family computes only videos of equal length together.
    short = 8 if preset == "tiny-llava-onevision" else 2
    prompts = [video_prompt(encoder, num_frames=8), video_prompt(encoder, num_frames=short)]
    engine = embedded(model)
    completions = engine.generate(requests_of(prompts), SamplingParams(max_tokens=6, seed=4))
    assert [c.prompt_token_ids for c in completions] == [p.token_ids for p in prompts]
    actor = Actor(model)
    assert logprob_error(actor, encoder, prompts, completions) < 1e-5
    # The comparison sees frames of another video.
    turned = {
        name: -tensor if "pixel" in name else tensor for name, tensor in prompts[0].tensors.items()
    }
    other = [replace(prompts[0], tensors=turned), prompts[1]]
    assert logprob_error(actor, encoder, other, completions) > 1e-3


@pytest.mark.parametrize("preset", [name for name in TINY_FAMILIES if name != "tiny-mllama"])
def test_a_turn_after_an_answer_with_images_scores_as_the_trainer_scores_it(preset):
    """Of every family, behind a prompt with a video where it reads those."""
    model, encoder = tiny(preset)
    engine = embedded(model)
    start = encoder.encode(prompt(encoder, "What?", 1), Media({"image": [image(84, 56, 9)]}))
    if "video" in encoder.family.reads:
        start = video_prompt(encoder)
    (said,) = engine.generate(requests_of([start]), SamplingParams(max_tokens=6, seed=1))
    media = after_answer(
        encoder, start, said, ("see ", image(56, 84, 5), " or ", image(112, 84, 6))
    )
    prompts = [media]
    params = SamplingParams(max_tokens=6, seed=4, n=2)
    completions = engine.generate(requests_of(prompts), params)
    assert [c.prompt_token_ids for c in completions] == [media.token_ids] * 2
    actor = Actor(model)
    assert logprob_error(actor, encoder, prompts, completions, n=2) < 1e-5
    pixels = media.tensors["pixel_values"]
    other = [replace(media, tensors={**media.tensors, "pixel_values": -pixels})]
    assert logprob_error(actor, encoder, other, completions, n=2) > 1e-3


@pytest.mark.parametrize("window", [2, 3, 24])
def test_images_beyond_the_sliding_window_score_as_the_trainer_scores_them(window):
    model, encoder = tiny("tiny-gemma3")
    set_window(model, window)
    prompts = Batch(model, encoder).prompts
    engine = embedded(model)
    completions = engine.generate(requests_of(prompts), SamplingParams(max_tokens=9, seed=4))
    actor = Actor(model)
    for is_packed in (False, True):
        actor.pack_samples(is_packed)
        assert logprob_error(actor, encoder, prompts, completions) < 1e-5
