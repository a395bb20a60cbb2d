"""Prompts that one call of the processor encodes are what calls of their own give."""

from pathlib import Path

import pytest
import torch
from tests.models.audio import sound_world
from tests.models.vision.tiny_families import TINY_FAMILIES, build_tiny
from tests.models.vision.tiny_world import MROPE, image, prompt, tiny, twin_of

from lightrft.datasets.types import Prompt
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_image
from lightrft.rollout.single_turn import build_requests

# Of these one call is enough; the other families' inputs do not tell whose they are.
TOGETHER = [*MROPE, "tiny-qwen3-vl-moe", "tiny-llava", "tiny-gemma3"]


@pytest.fixture
def calls(monkeypatch):
    """A function that counts the calls of a processor from now on."""

    def counted(processor):
        found, kind = [], type(processor)
        call = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda self, **given: found.append(given) or call(self, **given)
        )
        return found

    return counted


def assert_alike(found, expected):
    for name in ("token_ids", "request_token_ids", "token_types", "kinds", "media", "sizes"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def pictures(encoder):
    """Prompts of other lengths with one picture or two, of several sizes."""
    asked = [("How many?", (image(84, 84),)), ("Which of them is it then?", (image(56, 84, 2),))]
    asked += [("Both?", (image(112, 56, 3), image(84, 84, 4))), ("One?", (image(56, 56, 5),))]
    return [(prompt(encoder, text, len(shown)), Media({"image": shown})) for text, shown in asked]


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_pictures_of_several_prompts_are_those_of_each(preset, calls):
    _, encoder = tiny(preset)
    prompts = pictures(encoder)
    encoder.kept_all(prompts)  # which tries on blank pictures whether one call is enough
    encoder.forget()
    expected = [encoder.encode(*each) for each in prompts]
    made = calls(encoder.processor)
    found = encoder.kept_all([*prompts, prompts[0]])
    assert (len(made) == 1) == (preset in TOGETHER)
    for own, each in zip(found, expected, strict=False):
        assert_alike(own, each)
    assert found[-1] is found[0] is encoder.kept(*prompts[0])
    made.clear()
    encoder.forget()
    encoder.kept_all(prompts)
    assert len(made) == (1 if preset in TOGETHER else len(prompts))


def test_requests_of_a_rollout_take_one_call(calls):
    _, encoder = tiny(MROPE[0])
    shown = pictures(encoder)
    encoder.kept_all(shown)
    encoder.forget()
    encoded = [encoder.encode(*each) for each in shown]
    prompts = [
        Prompt(i, text, own.token_ids, media=media)
        for i, ((text, media), own) in enumerate(zip(shown, encoded, strict=True))
    ]
    made = calls(encoder.processor)
    found = build_requests([*prompts, Prompt(9, "text", (5,))], range(len(shown) + 1), encoder)
    assert len(made) == 1
    for request, own in zip(found, encoded, strict=False):
        assert_alike(request.encoded, own)


def test_sounds_of_several_prompts_are_those_of_each(calls):
    _, encoder = sound_world.tiny()
    prompts = [
        (sound_world.prompt(encoder, text, len(own)), sound_world.heard(encoder, *own))
        for text, own in [
            ("How high?", (sound_world.sound(1.0),)),
            ("Louder?", (sound_world.sound(0.31, 1), sound_world.sound(1.7, 2))),
        ]
    ]
    encoder.kept_all(prompts)
    encoder.forget()
    expected = [encoder.encode(*each) for each in prompts]
    made = calls(encoder.processor)
    for own, each in zip(encoder.kept_all(prompts), expected, strict=True):
        assert_alike(own, each)
    assert len(made) == 1


def test_a_damaged_picture_among_others_is_named():
    _, encoder = twin_of(build_tiny, preset=MROPE[0], seed=1)  # it calls for each from then on
    good, other = pictures(encoder)[:2]
    damaged = as_image(b"\x89PNG\r\n", name="picture 7", folder=Path())
    with pytest.raises(MediaError, match="picture 7"):
        encoder.kept_all([good, (other[0], Media({"image": [damaged]}))])
