"""Rows with images for the real engine of a tiny model, and how the trainer's actor scores them."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from tests.models.vision.tiny_world import tiny
from tests.rollout import stages
from tests.rollout.image_environments import squares

from lightrft.datasets.media import VisionPrompts
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.media.media import RowMedia
from lightrft.engines.types import EngineConfig
from lightrft.models.actor import Actor
from lightrft.records.media import encode_row
from lightrft.rollout.sampler import training_params
from lightrft.rollout.source import SampleRequests
from lightrft.strategy import get_fake_strategy

PRESETS = ("tiny-qwen2.5-vl", "tiny-gemma3")
LOGPROB = 1e-5
ROWS = (
    {"input": "<image>Look.", "images": ["0.png"], "number": 1},
    {"input": "And without?", "number": 2},
)


def noted_requests(engine):
    """The requests that an engine gets from now on."""
    found, generate = [], engine.generate

    def noted(requests, *others, **named):
        found.extend(requests)
        return generate(requests, *others, **named)

    engine.generate = noted
    return found


class ImageStage:
    """Two rows, of which one has an image; a subclass plays them with `player`."""

    def __init__(self, preset):
        self.model, self.encoder = tiny(preset)
        self.tokenizer = self.encoder.processor.tokenizer
        self.modality = VisionPrompts(self.encoder)

    def set_rows(self, folder, rows, columns):
        squares(0, (84, 84)).save(folder / "0.png")
        rows = [{**row, **columns} for row in rows]
        self.prompts = stages.load_rows(folder, rows, self.player.prompt_tokenizer, self.config)
        self.strategy = get_fake_strategy(self.config)
        self.strategy.session.last_weight_sync = SimpleNamespace(engine_hash=17)
        self.engine = HFEngine(EngineConfig("hf", ""), module=self.model)
        self.strategy.inference_engine = self.engine
        self.actor, self.requests = None, noted_requests(self.engine)

    def asked(self):
        # Random models seldom end: here bytes below 90 do.
        params = replace(training_params(self.config), stop_token_ids=tuple(range(90)))
        count = len(self.prompts)
        return SampleRequests(self.prompts, range(count), count, params, step=1)

    def encoded(self, rollouts):
        return tuple(encode_row(rollout, self.encoder) for rollout in rollouts)

    def check_scores(self, rollouts):
        """The engine scored each sampled token as the actor does, packed or not."""
        media = self.encoded(rollouts)
        assert error(self, rollouts, media) < LOGPROB
        assert error(self, rollouts, media, is_packed=True) < LOGPROB


def scores(stage, rollouts, media, *, is_packed=False):
    """The actor's logprobs of the sampled tokens of each row."""
    rows = [torch.tensor(rollout.token_ids) for rollout in rollouts]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    real, scored = torch.zeros_like(ids).bool(), torch.zeros_like(ids).bool()
    for i, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        start = len(rollout.completion.prompt_token_ids)
        ids[i, : len(row)], real[i, : len(row)] = row, True
        scored[i, start : len(row)] = torch.tensor(rollout.completion.is_sampled)
    stage.actor = stage.actor or Actor(stage.model)
    stage.actor.pack_samples(is_packed)
    with torch.no_grad():
        own = RowMedia(media)
        found = stage.actor(ids, real, scored_mask=scored, media=own).logprobs
    return [found[i][scored[i]] for i in range(len(rows))]


def error(stage, rollouts, media, **keywords):
    """Largest difference between engine and actor."""
    return max(
        float((torch.tensor(sampled_logprobs(rollout)) - own).abs().max())
        for rollout, own in zip(rollouts, scores(stage, rollouts, media, **keywords), strict=True)
    )


def sampled_logprobs(rollout):
    completion = rollout.completion
    pairs = zip(completion.output_logprobs, completion.is_sampled, strict=True)
    return [value for value, is_sampled in pairs if is_sampled]
