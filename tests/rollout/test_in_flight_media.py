"""Rows in flight whose prompts have images: a checkpoint names them, and the data bring them."""

import json

import pytest

from lightrft.config.files import FileError, typed
from lightrft.datasets.types import Prompt
from lightrft.engines.media.media import LaterImages, Media
from lightrft.engines.media.sources import ImageSource
from lightrft.records.media import media_of
from lightrft.rollout.in_flight import from_parts, to_bytes
from lightrft.rollout.open_groups import OpenGroup, OpenSample, StreamState
from lightrft.rollout.source import InFlight


def image(content):
    return ImageSource("row 1", content=content)


def prompts(*contents):
    seeing = Prompt(
        4, "<image> say", (1, 2, 2), media=Media({"image": tuple(map(image, contents))})
    )
    return seeing, Prompt(7, "say", (5,))


def in_flight(*found):
    groups = (OpenGroup(i, each, (OpenSample(),), "temperature") for i, each in enumerate(found))
    return InFlight(stream=StreamState(tuple(groups)))


def test_a_checkpoint_holds_no_images_and_its_rows_get_them_from_the_data():
    data = prompts(b"one" * 1000, b"two")
    written = to_bytes(in_flight(*data), 0)
    assert len(written) < 1500
    again = from_parts([written], 0, rank=0, world_size=1, media=media_of(data))
    assert [group.prompt for group in again.stream.groups] == list(data)
    assert again == in_flight(*data)


@pytest.mark.parametrize("contents", [(b"two", b"one"), (b"one",), ()])
def test_other_images_than_the_rows_were_sampled_with_are_refused(contents):
    written = to_bytes(in_flight(*prompts(b"one", b"two")), 0)
    with pytest.raises(ValueError, match="the images of prompt 4 are others than they were"):
        from_parts([written], 0, rank=0, world_size=1, media=media_of(prompts(*contents)))


@pytest.mark.parametrize(
    "media",
    [3, "a", None, [1], *({"by_kind": each} for each in (3, [1], {"image": 3}, {"image": [{}]}))],
)
def test_damaged_media_are_refused_with_their_place(media):
    text = json.loads(to_bytes(in_flight(*prompts(b"one")), 0))
    text["stream"]["groups"][0]["prompt"]["media"] = media
    place = r"rows in flight cannot be read: they: stream: groups\[0\]: prompt: media"
    with pytest.raises(ValueError, match=place):
        from_parts([json.dumps(text).encode()], 0, rank=0, world_size=1)


@pytest.mark.parametrize("images", [3, [3], ["a"], [{"name": 3}]])
def test_damaged_images_after_the_prompt_are_refused_with_their_place(images):
    later = {"start": 1, "num_skipped": 0, "text": "", "images": images}
    with pytest.raises(FileError, match="they: images"):
        typed(LaterImages, later, "they")


def test_rows_of_text_need_no_data():
    kept = in_flight(Prompt(4, "say", (1, 2)))
    assert from_parts([to_bytes(kept, 0)], 0, rank=0, world_size=1) == kept


def test_two_prompts_of_one_id_do_not_exchange_their_images():
    (first, _), (second, _) = prompts(b"one"), prompts(b"two")
    with pytest.raises(ValueError, match="two prompts in flight have the id 4"):
        to_bytes(in_flight(first, second), 0)
