"""The real vLLM on prompts with images and videos, against the trainer's own scores, in fp32."""

import pytest
import torch
from tests.engines.media_requests import logprob_error, requests_of, video_prompt
from tests.models.vision.tiny_world import encoded_prompts, image, prompt, tiny

from lightrft.engines import EngineConfig, SamplingParams, build_engine
from lightrft.engines.media.families import placeholder_ids
from lightrft.models.actor import Actor
from lightrft.models.loading import save_pretrained

pytestmark = pytest.mark.vllm

EXACT = [
    "tiny-qwen2.5-vl",
    pytest.param("tiny-qwen3-vl", marks=pytest.mark.slow),
    pytest.param("tiny-internvl", marks=pytest.mark.slow),
]
SAMPLED = SamplingParams(max_tokens=9, n=2, seed=4)


class World:
    """A started engine, and the trainer's model with the same weights."""

    def __init__(self, preset, directory):
        self.model, self.encoder = tiny(preset)
        save_pretrained(self.model, None, directory)
        self.encoder.processor.save_pretrained(directory)
        self.engine = build_engine(EngineConfig("vllm", str(directory), max_model_len=256))
        self.actor = Actor(self.model)
        self.prompts = encoded_prompts(self.encoder)

    def error(self, prompts, params=SAMPLED):
        """Largest difference of logprobs, and what was sampled."""
        completions = self.engine.generate(requests_of(prompts), params)
        return logprob_error(self.actor, self.encoder, prompts, completions, params.n), completions


@pytest.fixture(scope="module", params=EXACT)
def world(request, tmp_path_factory):
    found = World(request.param, tmp_path_factory.mktemp("checkpoint"))
    yield found
    found.engine.close()


def test_rows_with_and_without_images_score_as_the_trainer_scores_them(world):
    error, completions = world.error(world.prompts)
    assert error < 1e-5
    ids = [p if isinstance(p, tuple) else p.token_ids for p in world.prompts]
    assert [c.prompt_token_ids for c in completions] == [row for row in ids for _ in range(2)]
    forbidden = placeholder_ids(world.model.config)
    assert forbidden
    assert not {token for c in completions for token in c.output_token_ids} & set(forbidden)
    turned = (*world.prompts[:2], world.encoder.encode(
        prompt(world.encoder, "Which one is it?", 2), images=[image(112, 56, 3), image(56, 84, 2)]
    ))  # fmt: skip
    # The comparison sees another picture.
    assert logprob_error(world.actor, world.encoder, turned, completions, 2) > 1e-2


def test_a_minimum_continues_behind_the_pictures(world):
    params = SamplingParams(max_tokens=8, min_tokens=6, n=2, seed=1)
    error, _ = world.error(world.prompts[::2], params)
    assert error < 1e-5


@pytest.mark.parametrize("num_frames", [2, 8])
def test_videos_score_as_the_trainer_scores_them(world, num_frames):
    error, _ = world.error([video_prompt(world.encoder, num_frames=num_frames)])
    assert error < 1e-5
