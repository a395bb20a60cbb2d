"""The embedded engine samples prompts with images as the trainer scores them."""

import pytest
import torch
from tests.models.vision.tiny_world import Batch, image, prompt, tiny

from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.media.sources import MediaError
from lightrft.engines.types import EngineConfig, GenerationRequest, MultiModalInputs, SamplingParams
from lightrft.models.actor import Actor
from lightrft.models.vision.tiny import TINY_FAMILIES, write_tiny_vision_model


def requests_of(prompts):
    return [
        GenerationRequest(p, request_id=i)
        if isinstance(p, tuple)
        else GenerationRequest((), request_id=i, encoded=p)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_samples_score_as_the_trainer_scores_them(preset):
    model, encoder = tiny(preset)
    batch = Batch(model, encoder)
    engine = HFEngine(EngineConfig("hf", ""), module=model)
    params = SamplingParams(max_tokens=9, min_tokens=5, n=2, seed=4)
    calls = []
    tower = getattr(engine.native.base_model, batch.family.towers[0])
    tower.register_forward_hook(lambda *_: calls.append(1))
    completions = engine.generate(requests_of(batch.prompts), params)
    whole_batch = batch.family.takes_types or batch.family.attends_to_images
    assert len(calls) <= (2 if whole_batch else 1)
    forbidden = set(placeholder_ids(model.config))
    scored = Batch(model, encoder, prompts=[p for p in batch.prompts for _ in range(2)])
    scored.rows = [
        torch.tensor([*item.prompt_token_ids, *item.output_token_ids]) for item in completions
    ]
    width = max(map(len, scored.rows))
    token_ids = torch.zeros(6, width, dtype=torch.int64)
    real = torch.zeros(6, width, dtype=torch.bool)
    response = real.clone()
    for i, row in enumerate(scored.rows):
        token_ids[i, : len(row)], real[i, : len(row)] = row, True
        response[i, scored.starts[i] : len(row)] = True
    logprobs = Actor(model)(token_ids, real, scored_mask=response, media=scored.media).logprobs
    for i, item in enumerate(completions):
        p = scored.prompts[i]
        assert item.prompt_token_ids == (p if isinstance(p, tuple) else p.token_ids)
        assert not forbidden & set(item.output_token_ids)
        expected = logprobs[i][response[i]]
        torch.testing.assert_close(torch.tensor(item.output_logprobs), expected, atol=1e-5, rtol=0)


def test_raw_images_are_read_by_the_model_s_own_processor(tmp_path):
    write_tiny_vision_model(tmp_path, "tiny-qwen2.5-vl")
    engine = HFEngine(EngineConfig("hf", str(tmp_path)))
    _, encoder = tiny("tiny-qwen2.5-vl")
    text, picture = prompt(encoder, "How many?", 1), image(84, 84)
    encoded = encoder.encode(text, images=[picture])
    params = SamplingParams(max_tokens=4, seed=1)
    raw = GenerationRequest(
        encoded.request_token_ids, prompt_text=text,
        multi_modal=MultiModalInputs(images=(picture.decode(),)),
    )  # fmt: skip
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
    engine = HFEngine(EngineConfig("hf", ""), module=tiny_model())
    request = GenerationRequest((1, 2), multi_modal=MultiModalInputs(images=(b"",)))
    with pytest.raises(ValueError, match="the hf engine reads text only"):
        engine.generate([request], SamplingParams(max_tokens=1))
