"""What the vLLM adapter makes of encoded prompts, and what the encoder asks of a processor."""

from dataclasses import replace

import pytest
import torch
from tests.engines.media_requests import video_prompt
from tests.models.vision.tiny_world import image, prompt, tiny

from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.inputs import axes_of_rows
from lightrft.engines.media.media import Media
from lightrft.engines.rows import Job
from lightrft.engines.vllm.media import check_prompt, forbid_tokens, native_prompt


@pytest.fixture(scope="module")
def qwen():
    return tiny("tiny-qwen2.5-vl")


def job_of(encoded, *sampled):
    return Job((*encoded.token_ids, *sampled), 4, 0, media=encoded)


def encoded_with(encoder, *pictures):
    return encoder.encode(prompt(encoder, "How many?", len(pictures)), Media({"image": pictures}))


def test_a_request_has_one_placeholder_for_each_medium(qwen):
    _, encoder = qwen
    encoded = encoded_with(encoder, image(112, 56, 1), image(56, 84, 2))
    given = native_prompt(job_of(encoded, 70, 71))
    mark = encoder.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert given["prompt_token_ids"].count(mark) == 2
    assert given["prompt_token_ids"] == [*encoded.request_token_ids, 70, 71]
    assert encoded.token_ids.count(mark) == 8 + 6
    assert [picture.size for picture in given["multi_modal_data"]["image"]] == [(112, 56), (56, 84)]
    assert native_prompt(Job((5, 6), 4, 0)) == {"prompt_token_ids": [5, 6]}


def test_a_name_belongs_to_one_picture_at_one_size(qwen):
    _, encoder = qwen

    def names(encoded):
        return native_prompt(job_of(encoded))["multi_modal_uuids"]["image"]

    first = encoded_with(encoder, image(84, 84, 1))
    assert names(first) == names(encoded_with(encoder, image(84, 84, 1)))
    assert names(first) != names(encoded_with(encoder, image(84, 84, 2)))
    other = {"images_kwargs": {"size": {"longest_edge": 3136, "shortest_edge": 3136}}}
    assert names(first) != names(replace(first, sizes=other))


def test_a_video_has_the_facts_that_processors_ask_for(qwen):
    _, encoder = qwen
    ((frames, facts),) = native_prompt(job_of(video_prompt(encoder)))["multi_modal_data"]["video"]
    assert frames.shape == (4, 56, 56, 3)
    assert (facts["fps"], facts["duration"], facts["frames_indices"]) == (2.0, 2.0, [0, 1, 2, 3])
    assert facts["do_sample_frames"] is False


def test_other_token_ids_of_the_engine_are_named(qwen):
    _, encoder = qwen
    encoded = encoded_with(encoder, image(84, 84))
    check_prompt(encoded.token_ids, job_of(encoded))
    mark = encoder.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    place = encoded.token_ids.index(mark)
    # The first placeholder expanded once more, which is what expanded ids lead to.
    expanded = (*encoded.token_ids[:place], *[mark] * 8, *encoded.token_ids[place:])
    with pytest.raises(ValueError, match=f"differ first at token {place + 9}") as caught:
        check_prompt(expanded, job_of(encoded))
    assert "\n" not in str(caught.value)
    shorter = encoded.token_ids[:-1]
    with pytest.raises(ValueError, match=f"differ first at token {len(shorter)}"):
        check_prompt(shorter, job_of(encoded))


def test_forbidden_tokens_have_no_probability():
    model = torch.nn.Module()
    model.compute_logits = lambda hidden: None if hidden is None else hidden * 2
    forbid_tokens(model, (1, 3), vocab_size=5)
    found = model.compute_logits(torch.ones(2, 7))
    assert found.tolist() == [[2, -torch.inf, 2, -torch.inf, 2, -torch.inf, -torch.inf]] * 2
    assert model.compute_logits(None) is None


def test_a_processor_without_token_types_is_refused(qwen):
    _, encoder = qwen

    class Forgets:
        tokenizer = encoder.processor.tokenizer
        image_processor = encoder.processor.image_processor

        def __call__(self, **given):
            found = encoder.processor(**given)
            found.pop("mm_token_type_ids")
            return found

    with pytest.raises(ValueError, match="gave no mm_token_type_ids"):
        PromptEncoder(Forgets(), encoder.family).encode(
            prompt(encoder, "How many?", 1), Media({"image": [image(84, 84)]})
        )


@pytest.mark.parametrize("preset", ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_text_begins_behind_a_video_on_every_axis(preset):
    model, encoder = tiny(preset)
    encoded = video_prompt(encoder, num_frames=12, fps=1.0)
    row = torch.tensor([*encoded.token_ids, 70, 71])
    (places,) = axes_of_rows(model.base_model, [row], [encoded])
    types = torch.tensor([*encoded.token_types, 0, 0])
    for i in range(1, len(row)):
        if types[i] == 0:
            expected = places[:, :i].max() + 1
            assert places[:, i].tolist() == [int(expected)] * 3
