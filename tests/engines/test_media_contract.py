"""The contract of engines with images: here the embedded one, which needs no other package."""

import pytest
from tests.engines.media_contract import CHECKS
from tests.models.vision.tiny_world import encoded_prompts, tiny

from lightrft.engines import EngineConfig, build_engine
from lightrft.models.loading import save_pretrained


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    model, encoder = tiny("tiny-qwen2.5-vl")
    directory = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(model, None, directory)
    encoder.processor.save_pretrained(directory)
    engine = build_engine(EngineConfig("hf", str(directory), max_model_len=256))
    yield engine, encoder, encoded_prompts(encoder)
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_media(check, world):
    check(*world)
