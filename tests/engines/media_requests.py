"""Requests with images and videos, and the trainer's scores of what engines made of them."""

import torch
from tests.models.vision.tiny_world import Batch, image, prompt

from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import VideoSource
from lightrft.engines.types import GenerationRequest


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
