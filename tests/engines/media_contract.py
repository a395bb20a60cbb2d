"""What every engine that reads media must do with them; each check takes an engine and prompts."""

import dataclasses
import io

import pytest
from tests.engines.media_requests import requests_of
from tests.models.vision.tiny_world import image, prompt

from lightrft.engines import GenerationRequest, SamplingParams
from lightrft.engines.media.media import Media
from lightrft.strategy.fake import get_fake_strategy

SAMPLED = SamplingParams(max_tokens=7, n=2, seed=5)


def contents(completions):
    return [(c.request_id, c.sample_index, c.output_token_ids) for c in completions]


def token_ids(prompts):
    return [p if isinstance(p, tuple) else p.token_ids for p in prompts]


def prompts_come_back_expanded_and_in_order(engine, encoder, prompts):
    found = engine.generate(requests_of(prompts), SAMPLED)
    assert [(c.request_id, c.sample_index) for c in found] == [
        (i, j) for i in range(len(prompts)) for j in range(2)
    ]
    expected = [row for row in token_ids(prompts) for _ in range(2)]
    assert [c.prompt_token_ids for c in found] == expected
    assert contents(engine.generate(requests_of(prompts), SAMPLED)) == contents(found)
    other = engine.generate(requests_of(prompts), dataclasses.replace(SAMPLED, seed=6))
    assert contents(other) != contents(found)


def another_picture_has_another_law(engine, encoder, prompts):
    """One prompt with two pictures of one size: the token ids are the same, the law is not."""
    text = prompt(encoder, "How many?", 1)
    first, second = (
        encoder.encode(text, Media({"image": [image(84, 84, seed)]})) for seed in (1, 2)
    )
    assert first.token_ids == second.token_ids
    one, other, again = engine.generate(
        requests_of([first, second, first]),
        SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    assert abs(one.output_logprobs[0] - other.output_logprobs[0]) > 1e-3
    assert one.output_logprobs[0] == pytest.approx(again.output_logprobs[0], abs=1e-5)


def a_strategy_takes_nested_and_flat_lists(engine, encoder, prompts):
    """Of Pillow images, bytes, and none; as if the trainer had encoded them."""
    strategy = get_fake_strategy({"train_batch_size": 1})
    strategy.inference_engine = engine
    texts = [prompt(encoder, "One?", 1), prompt(encoder, "None?"), prompt(encoder, "Two?", 2)]
    sources = [image(84, 84, 0), image(112, 56, 1), image(56, 84, 2)]
    pictures = [sources[0].decode(), sources[1].read(), sources[2].decode()]
    params = SamplingParams(max_tokens=5, temperature=0.0, n=2, ignore_eos=True)
    rest = {"all_prompts": texts, "sleep_engine": False}
    nested = strategy.gather_and_generate(
        params, all_images=[pictures[:1], [], pictures[1:]], **rest
    )
    flat = strategy.gather_and_generate(params, all_images=pictures, images_num=[1, 0, 2], **rest)
    tokenizer = encoder.processor.tokenizer
    expected = engine.generate(
        [
            GenerationRequest(
                (), 0, encoded=encoder.encode(texts[0], Media({"image": sources[:1]}))
            ),
            GenerationRequest(tuple(tokenizer(texts[1], add_special_tokens=False)["input_ids"]), 1),
            GenerationRequest(
                (), 2, encoded=encoder.encode(texts[2], Media({"image": sources[1:]}))
            ),
        ],
        params,
    )
    for found in (nested, flat):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.prompt_token_ids == theirs.prompt_token_ids
            assert mine.output_token_ids == theirs.output_token_ids
            assert mine.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-5)
    with pytest.raises(ValueError, match="images_num"):
        strategy.gather_and_generate(params, all_images=pictures, images_num=[1, 1, 2], **rest)


def damaged_pictures_are_refused(engine, encoder, prompts):
    buffer = io.BytesIO()
    image(84, 84).decode().save(buffer, "JPEG")
    strategy = get_fake_strategy({"train_batch_size": 1})
    strategy.inference_engine = engine
    with pytest.raises(ValueError, match="image 1 of request 0 is"):
        strategy.gather_and_generate(
            SAMPLED,
            all_prompts=[prompt(encoder, "One?", 1)],
            all_images=[[buffer.getvalue()[:400]]],
            sleep_engine=False,
        )
    assert len(engine.generate(requests_of(prompts), SAMPLED)) == 6


CHECKS = [
    prompts_come_back_expanded_and_in_order,
    another_picture_has_another_law,
    a_strategy_takes_nested_and_flat_lists,
    damaged_pictures_are_refused,
]
