"""vLLM starts with the bounds of the run: sizes of pictures, and how many a prompt has."""

import pytest
from tests.engines.media_requests import requests_of
from tests.models.vision.tiny_world import build_tiny, image, prompt

from lightrft.config import TrainConfig
from lightrft.engines import EngineConfig, SamplingParams, build_engine
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import Media
from lightrft.engines.types import MediaBounds
from lightrft.engines.vllm.options import media_arguments
from lightrft.models.loading import save_pretrained
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.engine.generation import engine_config


def test_bounds_of_a_run_become_arguments_of_vllm():
    options = {"max_pixels": 3136, "limit_mm_image_per_prompt": 2, "pretrain": "m"}
    own = engine_config(TrainConfig(**options), "vllm", has_gpu=False, module=None)
    assert own.media == MediaBounds(3136, None, {"image": 2})
    assert media_arguments(own.media) == {
        "mm_processor_kwargs": {"images_kwargs": {"max_pixels": 3136}},
        "limit_mm_per_prompt": {"image": 2},
    }
    assert media_arguments(MediaBounds()) == {}
    # What tools show is in no row, and a strategy alone has no rows.
    shown = TrainConfig(**options, tools=("tools.py:f",), apply_chat_template=True)
    assert engine_config(shown, "vllm", has_gpu=False, module=None).media.per_prompt == {}
    alone = StrategyConfig(pretrain="m")
    assert engine_config(alone, "vllm", has_gpu=False, module=None).media == MediaBounds()


@pytest.mark.vllm
def test_an_engine_reads_pictures_within_the_bounds(tmp_path):
    model, processor = build_tiny("tiny-qwen2.5-vl")
    save_pretrained(model, None, tmp_path)
    processor.save_pretrained(tmp_path)
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    encoder = PromptEncoder(processor, family_of(model.config))
    bounds = MediaBounds(56 * 56, 28 * 28, {"image": 1, "video": 0})
    engine = build_engine(EngineConfig("vllm", str(tmp_path), max_model_len=128, media=bounds))
    try:
        config = engine.native.llm_engine.model_config.multimodal_config
        assert config.get_limit_per_prompt("image") == 1
        assert config.get_limit_per_prompt("video") == 0
        asked = encoder.encode(prompt(encoder, "How many?", 1), Media({"image": [image(300, 200)]}))
        assert asked.token_ids.count(processor.image_token_id) <= 4
        (found,) = engine.generate(requests_of([asked]), SamplingParams(max_tokens=2))
        assert found.prompt_token_ids == asked.token_ids
        two = encoder.encode(
            prompt(encoder, "?", 2), Media({"image": [image(84, 84), image(56, 56)]})
        )
        with pytest.raises(Exception, match="At most 1 image"):
            engine.generate(requests_of([two]), SamplingParams(max_tokens=2))
    finally:
        engine.close()
