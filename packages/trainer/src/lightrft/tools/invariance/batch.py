"""The rows of the step that all ways to carry it out share, and its loss."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightrft.algorithms.aggregation import aggregate
from lightrft.datasets.media import encoder_of
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.engines.media.media import NO_MEDIA, EncodedPrompt, Media, RowMedia
from lightrft.engines.media.sources import ImageSource
from lightrft.engines.media.text_encoder import TextEncoder
from lightrft.models import ActorOutput
from lightrft.models.loading import has_processor, load_config, load_processor

NUM_ROWS = 8
# Unequal, so that ranks and micro-batches hold unequal numbers of tokens.
PROMPT_LENGTHS = (3, 1, 7, 2, 5, 4, 1, 6)
RESPONSE_LENGTHS = (14, 9, 2, 21, 1, 11, 17, 5)
# Row -> an earlier row, and the number of tokens with which both begin.
BEGINNINGS = {2: (0, 4), 3: (1, 8), 4: (2, 3), 5: (3, 12), 6: (0, 12), 7: (5, 9)}
# Row -> response tokens [start, stop) of observations between turns: context that nobody sampled.
OBSERVATIONS = {0: ((4, 7),), 3: ((2, 3), (9, 15)), 6: ((1, 16),)}
KL_COEF, ENTROPY_COEF = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class LossRows:
    """Padded rows and what their losses need; per-token tensors are [rows, seq].

    Args:
        token_ids: int64.
        attention_mask: bool, True on real tokens.
        response_mask: bool, True on the tokens that the loss counts.
        advantages, ref_logprobs, returns: float32.
        media: Images of the rows.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    advantages: Tensor
    ref_logprobs: Tensor
    returns: Tensor
    media: RowMedia = NO_MEDIA

    def select(self, rows: slice | list[int], device: torch.device) -> LossRows:
        """Return some rows, without the columns that are padding in all of them."""
        width = int(self.attention_mask[rows].sum(dim=1).max())
        prompts = self.media.prompts
        if prompts:
            numbers = range(NUM_ROWS)[rows] if isinstance(rows, slice) else rows
            prompts = tuple(prompts[number] for number in numbers)
        return self._changed(
            lambda tensor: tensor[rows, :width].to(device), RowMedia(prompts, self.media.present)
        )

    def at(self, rows: Tensor, columns: Tensor) -> LossRows:
        """Return some tokens, as one row: [1, tokens]."""
        return self._changed(lambda tensor: tensor[rows, columns][None], NO_MEDIA)

    def _changed(self, change: Callable[[Tensor], Tensor], media: RowMedia) -> LossRows:
        names = (field.name for field in fields(self) if field.name != "media")
        return replace(self, **{name: change(getattr(self, name)) for name in names}, media=media)


def make_rows(
    vocab_size: int,
    *,
    seed: int = 0,
    prompts: Sequence[EncodedPrompt | None] = (),
    forbidden_ids: Sequence[int] = (),
) -> LossRows:
    """Return random rows of unequal lengths; one response does not count.

    Some rows begin alike, as samples of a prompt, and some have several turns.

    Args:
        vocab_size: Vocabulary size of the model.
        seed: Seed of all numbers.
        prompts: Prompts of rows that begin with images; None, or () for all, where they do not.
        forbidden_ids: Tokens that do not occur beside those of `prompts`.
    """
    rng = np.random.default_rng(seed)
    prompts = prompts or (None,) * NUM_ROWS
    prompt_lengths = [
        usual if prompt is None else len(prompt.token_ids)
        for usual, prompt in zip(PROMPT_LENGTHS, prompts, strict=True)
    ]
    starts = np.array(prompt_lengths)[:, None]
    lengths = starts + np.array(RESPONSE_LENGTHS)[:, None]
    columns = np.arange(lengths.max())[None, :]
    shape = (NUM_ROWS, int(lengths.max()))
    is_response = (columns >= starts) & (columns < lengths)
    is_response[4] = False
    for row, spans in OBSERVATIONS.items():
        for start, stop in spans:
            is_response[row, prompt_lengths[row] + start : prompt_lengths[row] + stop] = False

    def noise(scale: float) -> Tensor:
        return torch.from_numpy(rng.normal(0, scale, shape).astype(np.float32))

    allowed = np.setdiff1d(np.arange(vocab_size), np.array(forbidden_ids, dtype=np.int64))
    token_ids = allowed[rng.integers(0, len(allowed), shape)]
    for row, (earlier, count) in BEGINNINGS.items():
        token_ids[row, :count] = token_ids[earlier, :count]
    for row, prompt in enumerate(prompts):
        if prompt is not None:
            token_ids[row, : len(prompt.token_ids)] = prompt.token_ids
    media = NO_MEDIA
    shown = next(filter(None, prompts), None)
    if shown is not None:
        # Every forward pass of every rank runs the tower, as it does in a run.
        media = RowMedia(tuple(prompts), {"image": shown})
    return LossRows(
        token_ids=torch.from_numpy(token_ids),
        attention_mask=torch.from_numpy(columns < lengths),
        response_mask=torch.from_numpy(is_response),
        advantages=noise(1.0),
        ref_logprobs=noise(0.5) - float(np.log(vocab_size)),
        returns=noise(1.0),
        media=media,
    )


def policy_share(output: ActorOutput, rows: LossRows, normalizer: Tensor) -> Tensor:
    """Return a share of the token mean of -A lp + KL_COEF (lp - ref)^2 / 2 - ENTROPY_COEF H."""
    if output.entropy is None:
        raise RuntimeError("the policy loss needs entropies")
    logprobs = output.logprobs
    penalty = 0.5 * KL_COEF * (logprobs - rows.ref_logprobs).square()
    token_loss = penalty - rows.advantages * logprobs - ENTROPY_COEF * output.entropy
    token_loss = torch.where(rows.response_mask, token_loss, 0.0)
    return aggregate(token_loss, rows.response_mask, "token-mean", normalizer)


def value_share(values: Tensor, rows: LossRows, normalizer: Tensor) -> Tensor:
    """Return a share of the token mean of (v - returns)^2 / 2."""
    token_loss = torch.where(rows.response_mask, 0.5 * (values - rows.returns).square(), 0.0)
    return aggregate(token_loss, rows.response_mask, "token-mean", normalizer)


# Width and height of the pictures of each row; not all ranks and micro-batches have some.
SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((84, 84),),
    (),
    ((112, 56), (56, 84)),
    (),
    ((56, 56),),
    (),
    (),
    (),
)
# Row -> an earlier row that has the same pictures.
SHOWN_AGAIN = {6: 4}


def draw_prompts(path: str, seed: int) -> tuple[EncodedPrompt | None, ...]:
    """Return prompts of the rows that have pictures of noise; () for a model that reads none.

    Args:
        path: Checkpoint of the model; without a processor it reads text.
        seed: Seed of the noise.
    """
    family = family_of(load_config(path))
    if family is None or not family.reads or not has_processor(Path(path)):
        return ()
    encoder = encoder_of(load_processor(path), family)
    if isinstance(encoder, TextEncoder):
        return ()
    rng = np.random.default_rng(seed)
    prompts = [_encode(encoder, sizes, rng) if sizes else None for sizes in SIZES]
    return tuple(prompts[SHOWN_AGAIN.get(row, row)] for row in range(NUM_ROWS))


def _encode(
    encoder: PromptEncoder, sizes: tuple[tuple[int, int], ...], rng: np.random.Generator
) -> EncodedPrompt:
    from PIL import Image

    images = []
    for width, height in sizes:
        buffer = io.BytesIO()
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        images.append(ImageSource("a picture of noise", content=buffer.getvalue()))
    parts = [*({"type": "image"} for _ in sizes), {"type": "text", "text": "?"}]
    text = encoder.processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    return encoder.encode(str(text), Media({"image": images}))
