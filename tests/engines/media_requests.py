"""Requests with images and videos, and the trainer's scores of what engines made of them."""

from dataclasses import replace

import pytest
import torch
from tests.models.vision.tiny_world import Batch, image, prompt

from lightrft.datasets.chat_ids import ChatIds
from lightrft.datasets.media import VisionPrompts
from lightrft.datasets.suffix import TurnSuffix
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import VideoSource
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.strategy.fake import get_fake_strategy


def requests_of(prompts):
    return [
        GenerationRequest(p, request_id=i)
        if isinstance(p, tuple)
        else GenerationRequest((), request_id=i, encoded=p)
        for i, p in enumerate(prompts)
    ]


def video(num_frames=4, fps=2.0, side=56):
    frames = tuple(image(side, side, seed) for seed in range(num_frames))
    return VideoSource("a video", frames, fps)


def video_prompt(encoder, **facts):
    return encoder.encode(prompt(encoder, "What falls?", 0, 1), Media({"video": [video(**facts)]}))


def after_answer(encoder, start, said, answer):
    """A prompt and what was said, and behind it an answer of texts and pictures."""
    turn = (*said.prompt_token_ids, *said.output_token_ids)
    suffix = TurnSuffix(ChatIds(encoder.processor.tokenizer, VisionPrompts(encoder)))
    added = suffix.after(said.output_token_ids, [answer])
    later = [replace(each, start=each.start + len(turn)) for each in added.later]
    row = (*turn, *added.token_ids)
    media = encoder.row(row, start, later)
    media = media.continued(row[len(media.token_ids) :])
    assert media.token_ids == row
    return media


def trainer_logprobs(actor, encoder, prompts, completions):
    """Of each completion, the trainer's logprobs of its tokens, [tokens] each.

    Args:
        prompts: Of each completion.
    """
    batch = Batch(actor, encoder, prompts=prompts)
    rows = [torch.tensor([*c.prompt_token_ids, *c.output_token_ids]) for c in completions]
    width = max(map(len, rows))
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    response = real.clone()
    for i, (row, start) in enumerate(zip(rows, batch.starts, strict=True)):
        token_ids[i, : len(row)], real[i, : len(row)] = row, True
        response[i, start : len(row)] = True
    with torch.no_grad():
        scores = actor(token_ids, real, scored_mask=response, media=batch.media).logprobs
    return [scores[i][response[i]] for i in range(len(rows))]


def logprob_error(actor, encoder, prompts, completions, n=1):
    """Largest difference between the engine's logprobs and the trainer's, over all tokens."""
    repeated = [p for p in prompts for _ in range(n)]
    expected = trainer_logprobs(actor, encoder, repeated, completions)
    return max(
        float((torch.tensor(c.output_logprobs) - e).abs().max())
        for c, e in zip(completions, expected, strict=True)
    )


def check_lists_of_a_strategy(engine, encoder):
    """Take lists of images, bytes and none, nested and flat, as if the trainer had encoded them."""
    strategy = get_fake_strategy({"train_batch_size": 1})
    strategy.inference_engine = engine
    texts = [prompt(encoder, "One?", 1), prompt(encoder, "None?"), prompt(encoder, "Two?", 2)]
    sources = [image(84, 84, 0), image(112, 56, 1), image(56, 84, 2)]
    pictures = [sources[0].decode(), sources[1].read(), sources[2].decode()]
    params = SamplingParams(max_tokens=5, temperature=0.0, n=2, ignore_eos=True)
    rest = {"all_prompts": texts, "sleep_engine": False}
    nested = strategy.gather_and_generate(
        params, all_images=[pictures[:1], [], pictures[1:]], **rest
    )
    flat = strategy.gather_and_generate(params, all_images=pictures, images_num=[1, 0, 2], **rest)
    tokenizer = encoder.processor.tokenizer
    expected = engine.generate(
        [
            GenerationRequest(
                (), 0, encoded=encoder.encode(texts[0], Media({"image": sources[:1]}))
            ),
            GenerationRequest(tuple(tokenizer(texts[1], add_special_tokens=False)["input_ids"]), 1),
            GenerationRequest(
                (), 2, encoded=encoder.encode(texts[2], Media({"image": sources[1:]}))
            ),
        ],
        params,
    )
    for found in (nested, flat):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.prompt_token_ids == theirs.prompt_token_ids
            assert mine.output_token_ids == theirs.output_token_ids
            assert mine.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-5)
    with pytest.raises(ValueError, match="images_num"):
        strategy.gather_and_generate(params, all_images=pictures, images_num=[1, 1, 2], **rest)
