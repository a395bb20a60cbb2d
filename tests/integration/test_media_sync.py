"""Weight syncs of vision-language models find features that an engine keeps of older weights."""

import copy

import pytest
import torch
from tests.engines.altered_engines import CopyingEngine
from tests.engines.media_requests import requests_of
from tests.models.vision.tiny_world import encoded_prompts, tiny

from lightrft.engines import EngineConfig, SamplingParams
from lightrft.models.actor import Actor
from lightrft.strategy.fake import get_fake_strategy
from lightrft.strategy.weight_sync.verification import WeightSyncError


class KeepsFeatures(CopyingEngine):
    """Fault: what the tower said about a picture is kept for ever."""

    def keep(self):
        kept = {}

        def cached(tower, args, output):
            # The caller writes into what it is given.
            return copy.copy(kept.setdefault(args[0].numpy().tobytes(), copy.copy(output)))

        self._model.base_model.visual.register_forward_hook(cached)


def changed(tower):
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)


@pytest.mark.parametrize("is_faulty", [False, True])
def test_features_of_older_weights_are_found(is_faulty):
    torch.manual_seed(0)
    model, encoder = tiny("tiny-qwen2.5-vl")
    engine = KeepsFeatures(EngineConfig("hf", ""), module=model)
    actor = Actor(model)
    strategy = get_fake_strategy({"train_batch_size": 1})
    strategy.inference_engine = engine
    if is_faulty:
        engine.keep()
    assert strategy.update_engine_weights(actor).canary_difference < 1e-4
    engine.generate(requests_of(encoded_prompts(encoder)), SamplingParams(max_tokens=3))
    assert strategy.update_engine_weights(actor).canary_difference < 1e-4
    changed(model.base_model.visual)
    if not is_faulty:
        assert strategy.update_engine_weights(actor).canary_difference < 1e-4
        return
    with pytest.raises(WeightSyncError, match="a prompt with images or videos differently"):
        strategy.update_engine_weights(actor)
