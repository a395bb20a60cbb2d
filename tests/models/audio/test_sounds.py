"""Sounds in particular; tests of pictures score rows with sounds, too."""

from dataclasses import replace

import pytest
import torch
from tests.models.audio.sound_world import batch_of, encoded_prompts, heard, prompt, sound, tiny
from tests.models.vision.tiny_world import scored

from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import Media, RowMedia
from lightrft.engines.media.text_encoder import TextEncoder
from lightrft.engines.types import EngineConfig, GenerationRequest, MultiModalInputs, SamplingParams
from lightrft.engines.vllm.media import name_tower
from lightrft.models.actor import Actor
from lightrft.tools.tiny_media_models import write_tiny_media_model

LOGPROB = 1e-5


def test_the_slow_way_gives_the_same_features():
    """Each sound through the tower alone, without padding between sounds, put in by hand."""
    model, encoder = tiny()
    own = encoded_prompts(encoder)[2]
    lengths = (((own.tensors["feature_attention_mask"].sum(-1) - 1) // 2 + 1) - 2) // 2 + 1
    places = torch.tensor([own.token_ids]) == model.config.audio_token_id
    assert int(places.sum()) == int(lengths.sum())
    trunk, pieces = model.model, []
    for i, length in enumerate(lengths.tolist()):
        mel = own.tensors["input_features"][i : i + 1]
        mask = torch.zeros(1, 1, mel.shape[-1] // 2, mel.shape[-1] // 2)
        seen = (int(own.tensors["feature_attention_mask"][i].sum()) - 1) // 2 + 1
        mask[..., seen:] = float("-inf")
        states = trunk.audio_tower(mel, attention_mask=mask).last_hidden_state
        pieces.append(trunk.multi_modal_projector(states)[0, :length])
    ids = torch.tensor([own.token_ids])
    embeds = model.get_input_embeddings()(ids).clone()
    embeds[places] = torch.cat(pieces)
    by_hand = model.lm_head(trunk.language_model(inputs_embeds=embeds, use_cache=False)[0])
    given = model(input_ids=ids, **own.tensors, use_cache=False).logits
    torch.testing.assert_close(given, by_hand, atol=1e-5, rtol=0)


@torch.no_grad()
def test_faults_are_seen():
    """Another row's sound, features in the next place, and a sound at another rate."""
    model, encoder = tiny()
    batch = batch_of(model, encoder)
    alone = batch.alone(model, 2)
    actor = Actor(model)

    def error(change):
        prompts = (*batch.media.prompts[:2], change(batch.media.prompts[2]))
        found = batch.of_rows(scored(actor, batch, RowMedia(prompts)))[2]
        return float((found - alone).abs().max())

    def with_tensor(own, name, value):
        return replace(own, tensors={**own.tensors, name: value})

    assert error(lambda own: own) < LOGPROB
    mel = batch.media.prompts[2].tensors["input_features"]
    assert error(lambda own: with_tensor(own, "input_features", mel.flip(0))) > 1e-2
    assert error(lambda own: with_tensor(own, "input_features", mel.roll(4, -1))) > 1e-2
    wrong = encoder.encode(
        prompt(encoder, "Which is louder?", 2), heard(encoder, sound(0.31, 1, 8000), sound(1.7, 2))
    )
    assert wrong.token_ids == batch.media.prompts[2].token_ids
    assert error(lambda own: wrong) > 1e-3


def test_a_sound_of_another_rate_is_refused_by_the_processor():
    """A waveform is named with its rate, so that no fault in ours reaches the features."""
    _, encoder = tiny()
    own = sound(1.0)
    wrong = own.by_rules(replace(heard(encoder, own).audios[0].rules, rate=8000))
    with pytest.raises(ValueError, match="sampling rate of 16000"):
        encoder.encode(prompt(encoder, "?", 1), Media({"audio": [wrong]}))


def test_features_equal_places_or_the_row_is_refused(monkeypatch):
    _, encoder = tiny()
    replace_token = encoder.processor.replace_audio_token

    def one_more(*args, **given):
        return replace_token(*args, **given) + "<|AUDIO|>"

    monkeypatch.setattr(encoder.processor, "replace_audio_token", one_more)
    with pytest.raises(ValueError, match=r"gave 25 features and 26 places for .* 1 audios"):
        encoder.encode(prompt(encoder, "?", 1), heard(encoder, sound(1.0)))


def test_raw_sounds_are_heard_by_the_engine_s_own_processor(tmp_path):
    write_tiny_media_model(tmp_path, "tiny-qwen2-audio")
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


def test_models_that_hear_and_are_not_known_read_text_alone():
    from transformers import VoxtralConfig

    family = family_of(VoxtralConfig())
    assert not family.reads
    assert "those of models of type 'voxtral' are not supported" in TextEncoder(family).hindrance
