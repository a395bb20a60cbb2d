"""Tiny models of each family with images, for tests."""

from functools import cache
from pathlib import Path

import torch
from tests.datasets.media_files import picture
from tests.models.vision.tiny_families import TINY_FAMILIES, build_tiny

from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of, placeholder_ids
from lightrft.engines.media.media import Media, RowMedia
from lightrft.engines.media.sources import as_image
from lightrft.models.proof import random_rows, separate_rows

PACKABLE = [name for name in TINY_FAMILIES if name != "tiny-mllama"]
LINEAR = ("tiny-qwen3.5", "tiny-qwen3.5-moe")
MROPE = ["tiny-qwen2-vl", "tiny-qwen2.5-vl", "tiny-qwen3-vl", *LINEAR, "tiny-glm4v"]


def pack(actor):
    """Pack rows; layers that would mix them are called once for each."""
    separate_rows(actor, random_rows(actor, torch.device("cpu")))
    actor.pack_samples()


def image(width, height, seed=0):
    return as_image(picture(width, height, seed), name=f"image {seed}", folder=Path())


def shaken(model):
    """Every bias, norm and gate gets a value that matters."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1 or not parameter.any():
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@cache
def _parts(build, **options):
    model, processor = build(**options)
    return shaken(model), PromptEncoder(processor, family_of(model.config))


def twin_of(build, **options):
    """A new model with the same weights, and its encoder."""
    model, encoder = _parts(build, **options)
    twin, _ = build(**options)
    twin.load_state_dict(model.state_dict())
    return twin.eval(), encoder


def tiny(preset):
    return twin_of(build_tiny, preset=preset)


def tower_of(model):
    """The first module that reads pixels or sounds."""
    towers = ("visual", "vision_tower", "vision_model", "audio_tower")
    return next(part for name, part in model.base_model.named_children() if name in towers)


def set_window(model, window):
    """Lets the sliding layers of a Gemma 3 see so many tokens."""
    model.config.text_config.sliding_window = window
    for module in model.modules():
        if getattr(module, "is_sliding", False):
            module.sliding_window = window


def prompt(encoder, text, num_images=0, num_videos=0, num_sounds=0):
    kinds = ["image"] * num_images + ["video"] * num_videos + ["audio"] * num_sounds
    parts = [{"type": kind} for kind in kinds]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return encoder.processor.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def encoded_prompts(encoder):
    """One image, no image, two images of other sizes."""
    text = prompt(encoder, "plain text")
    return (
        encoder.encode(prompt(encoder, "How many?", 1), Media({"image": [image(84, 84)]})),
        tuple(encoder.processor.tokenizer(text, add_special_tokens=False)["input_ids"]),
        encoder.encode(
            prompt(encoder, "Which one is it?", 2),
            Media({"image": [image(112, 56, 1), image(56, 84, 2)]}),
        ),
    )


class Batch:
    """Right-padded rows with random responses, and what each row is alone."""

    def __init__(self, model, encoder, prompts=None, num_tokens=7, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.config, self.family = model.config, family_of(model.config)
        forbidden = set(placeholder_ids(model.config))
        allowed = [t for t in range(256) if t not in forbidden]
        self.prompts = prompts or encoded_prompts(encoder)
        self.media = RowMedia(tuple(None if isinstance(p, tuple) else p for p in self.prompts))
        self.rows, self.starts = [], []
        for i, p in enumerate(self.prompts):
            ids = p if isinstance(p, tuple) else p.token_ids
            picks = torch.randint(len(allowed), (num_tokens + i,), generator=generator)
            self.rows.append(torch.tensor([*ids, *(allowed[k] for k in picks)]))
            self.starts.append(len(ids))
        width = max(map(len, self.rows))
        self.token_ids = torch.zeros(len(self.rows), width, dtype=torch.int64)
        self.attention_mask = torch.zeros(len(self.rows), width, dtype=torch.bool)
        self.scored = self.attention_mask.clone()
        for i, row in enumerate(self.rows):
            self.token_ids[i, : len(row)] = row
            self.attention_mask[i, : len(row)] = True
            self.scored[i, self.starts[i] : len(row)] = True

    def arguments(self, i):
        """What transformers' own forward wants for row i, without positions."""
        p = self.media.prompts[i]
        ids = self.rows[i][None]
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if p is None:
            return found
        for name, tensor in p.tensors.items():
            if name in self.family.token_axis:
                more = tensor[:, -1:].expand(-1, ids.shape[1] - tensor.shape[1], *tensor.shape[2:])
                tensor = torch.cat([tensor, more], 1)
            found[name] = tensor.float() if tensor.is_floating_point() else tensor
        if p.token_types is not None:
            types = [*p.token_types] + [0] * (ids.shape[1] - len(p.token_types))
            found[self.family.token_types] = torch.tensor([types])
        return found

    def alone(self, model, i):
        """Logprobs of row i's response by transformers' own forward."""
        return self.response_logprobs(model(**self.arguments(i), use_cache=False).logits, i)

    def each_alone(self, model):
        return [self.alone(model, i) for i in range(len(self.rows))]

    def response_logprobs(self, logits, i):
        """Of row i's response, from logits [1, tokens, vocab]."""
        start = self.starts[i]
        logits = logits[0, start - 1 : -1].float()
        forbidden = torch.tensor(placeholder_ids(self.config), dtype=torch.int64)
        logprobs = logits.index_fill(-1, forbidden, float("-inf")).log_softmax(-1)
        return logprobs.gather(-1, self.rows[i][start:, None])[:, 0]

    def of_rows(self, values):
        return [values[i][self.scored[i]] for i in range(len(self.rows))]


def scored(actor, batch, media=None):
    return actor(
        batch.token_ids,
        batch.attention_mask,
        scored_mask=batch.scored,
        media=batch.media if media is None else media,
    ).logprobs
