"""Sounds in particular; tests of pictures score rows with sounds, too."""

import pytest
from tests.models.audio.sound_world import heard, prompt, sound, tiny

from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.types import EngineConfig, GenerationRequest, MultiModalInputs, SamplingParams
from lightrft.engines.vllm.media import name_tower
from lightrft.tools.tiny_audio_models import write_tiny_audio_model

LOGPROB = 1e-5


def test_features_equal_places_or_the_row_is_refused(monkeypatch):
    _, encoder = tiny()
    replace_token = encoder.processor.replace_audio_token

    def one_more(*args, **given):
        return replace_token(*args, **given) + "<|AUDIO|>"

    monkeypatch.setattr(encoder.processor, "replace_audio_token", one_more)
    with pytest.raises(ValueError, match=r"gave 25 features and 26 places for .* 1 audios"):
        encoder.encode(prompt(encoder, "?", 1), heard(encoder, sound(1.0)))


def test_raw_sounds_are_heard_by_the_engine_s_own_processor(tmp_path):
    write_tiny_audio_model(tmp_path)
    engine = HFEngine(EngineConfig("hf", str(tmp_path)))
    _, encoder = tiny()
    own = sound(0.7)
    text = prompt(encoder, "What?", 1)
    media = MultiModalInputs(others={"audio": (own,)})
    requests = [
        GenerationRequest((), 1, prompt_text=text, multi_modal=media),
        GenerationRequest((), 1, encoded=encoder.encode(text, heard(encoder, own))),
    ]
    params = SamplingParams(max_tokens=4, seed=1)
    found = [engine.generate([request], params)[0] for request in requests]
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].output_logprobs == found[1].output_logprobs


def test_vllm_is_refused_before_it_loads_anything():
    with pytest.raises(ValueError, match=r"cannot take weights of 'qwen2_audio'.* engine_type hf"):
        name_tower("qwen2_audio")
