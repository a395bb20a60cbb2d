"""The contract of engines with images: here the ones that need no other package."""

import pytest
from tests.engines import fake_engine  # noqa: F401 - registers "fake"
from tests.engines.media_contract import CHECKS, a_strategy_takes_nested_and_flat_lists
from tests.models.vision.tiny_world import encoded_prompts, tiny

from lightrft.engines import EngineConfig, build_engine
from lightrft.models.loading import save_pretrained


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    model, encoder = tiny("tiny-qwen2.5-vl")
    directory = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(model, None, directory)
    encoder.processor.save_pretrained(directory)
    engines = {
        name: build_engine(EngineConfig(name, str(directory), max_model_len=256))
        for name in ("hf", "fake")
    }
    yield engines, encoder, encoded_prompts(encoder)
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("name", ["hf", "fake"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_media(check, name, world):
    engines, encoder, prompts = world
    if name == "fake" and check is a_strategy_takes_nested_and_flat_lists:
        pytest.skip("the fake engine has no processor; tests/strategy has its lists")
    check(engines[name], encoder, prompts)
