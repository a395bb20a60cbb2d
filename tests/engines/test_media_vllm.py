"""The real vLLM on prompts with images and videos, against the trainer's own scores, in fp32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.datasets.film_files import film
from tests.engines.media_requests import (
    after_answer,
    check_lists_of_a_strategy,
    logprob_error,
    requests_of,
    video_prompt,
)
from tests.engines.syncs import canary_of
from tests.models.batches import perturb
from tests.models.vision.tiny_world import encoded_prompts, image, prompt, tiny, tower_of

from lightrft.engines import EngineConfig, SamplingParams, build_engine
from lightrft.engines.media.families import placeholder_ids
from lightrft.engines.media.media import Media
from lightrft.engines.media.sources import as_video
from lightrft.engines.types import MediaBounds
from lightrft.kernels import hash_tensor
from lightrft.models.actor import Actor
from lightrft.models.loading import save_pretrained
from lightrft.strategy.weight_sync.canary import media_seen
from lightrft.strategy.weight_sync.parameter_source import module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync
from lightrft.strategy.weight_sync.verification import WeightSyncError

pytestmark = [pytest.mark.shard("vision_vllm"), pytest.mark.vllm]

MORE = ("qwen2-vl", "qwen3-vl", "internvl", "llava", "idefics3", "smolvlm", "mistral3")
EXACT = [
    "tiny-qwen2.5-vl",
    *(pytest.param(f"tiny-{name}", marks=pytest.mark.slow) for name in MORE),
]
SAMPLED = SamplingParams(max_tokens=9, n=2, seed=4)
LONGEST = 512


class World:
    """A started engine, and the trainer's model with the same weights."""

    def __init__(self, preset, directory):
        self.model, self.encoder = tiny(preset)
        save_pretrained(self.model, None, directory)
        self.encoder.processor.save_pretrained(directory)
        # Another number than tests run with, however the suite was started.
        torch.set_num_threads(2)
        self.engine = build_engine(EngineConfig("vllm", str(directory), max_model_len=LONGEST))
        self.actor = Actor(self.model)
        self.prompts = encoded_prompts(self.encoder)

    def sync(self, **options):
        """Sends the trainer's weights and compares hashes and canaries."""
        media = media_seen(self.engine, None)
        canary = canary_of(self.actor, max_length=LONGEST, media=media)
        sync = WeightSync(self.engine, **options)
        return sync.sync(module_parameter_source(self.actor), canary=canary)

    @property
    def tower(self):
        return tower_of(self.model)

    def error(self, prompts, params=SAMPLED):
        """Largest difference of logprobs, and what was sampled."""
        completions = self.engine.generate(requests_of(prompts), params)
        return logprob_error(self.actor, self.encoder, prompts, completions, params.n), completions


@pytest.fixture(scope="module", params=EXACT)
def world(request, tmp_path_factory):
    found = World(request.param, tmp_path_factory.mktemp("checkpoint"))
    yield found
    found.engine.close()


def test_a_turn_after_an_answer_with_images_scores_as_the_trainer_scores_it(world):
    """The same ids are sampled on, with the images of the prompt and two that stand behind it."""
    first, plain = world.prompts[:2]
    completions = world.engine.generate(requests_of([first, plain]), replace(SAMPLED, n=1))
    rows = []
    for start, said in zip((first, None), completions, strict=True):
        answer = ("see ", image(56, 84, 5), " or ", image(112, 84, 6), "?")
        rows.append(after_answer(world.encoder, start, said, answer))
    error, completions = world.error(rows)
    assert error < 1e-5
    assert [c.prompt_token_ids for c in completions] == [r.token_ids for r in rows for _ in "12"]
    shown = [Media({"image": [image(width, 84, 5)]}) for width in (56, 112)]
    text = prompt(world.encoder, "?", 1)
    small, large = (world.encoder.encode(text, each).token_ids for each in shown)
    if small == large:  # ids are the same for whatever pictures
        return
    exchanged = [replace(row, media=Media({"image": row.media.images[::-1]})) for row in rows]
    with pytest.raises(ValueError, match="vLLM reads a prompt with") as refused:
        world.error(exchanged)
    assert "\n" not in str(refused.value)


def test_rows_with_and_without_images_score_as_the_trainer_scores_them(world):
    error, completions = world.error(world.prompts)
    assert error < 1e-5
    ids = [p if isinstance(p, tuple) else p.token_ids for p in world.prompts]
    assert [c.prompt_token_ids for c in completions] == [row for row in ids for _ in range(2)]
    forbidden = placeholder_ids(world.model.config)
    assert forbidden
    assert not {token for c in completions for token in c.output_token_ids} & set(forbidden)
    turned = (
        *world.prompts[:2],
        world.encoder.encode(
            prompt(world.encoder, "Which one is it?", 2),
            Media({"image": [image(112, 56, 3), image(56, 84, 2)]}),
        ),
    )
    # The comparison sees another picture.
    assert logprob_error(world.actor, world.encoder, turned, completions, 2) > 1e-2


def test_a_strategy_takes_nested_and_flat_lists(world):
    check_lists_of_a_strategy(world.engine, world.encoder)


def test_a_minimum_continues_behind_the_pictures(world):
    params = SamplingParams(max_tokens=8, min_tokens=6, n=2, seed=1)
    error, _ = world.error(world.prompts[::2], params)
    assert error < 1e-5


@pytest.mark.parametrize("num_frames", [2, 8])
def test_videos_score_as_the_trainer_scores_them(world, num_frames):
    if "video" not in world.encoder.family.reads:
        with pytest.raises(ValueError, match="read no videos"):
            video_prompt(world.encoder, num_frames=num_frames)
        return
    prompts = [video_prompt(world.encoder, num_frames=num_frames)]
    if not world.encoder.family.has_axes:
        # InternVL: other marks stand for frames in vLLM than in its processor.
        with pytest.raises(ValueError, match=r"0 images and 1 videos .* they differ first at"):
            world.error(prompts)
        return
    assert world.error(prompts)[0] < 1e-5


def test_films_score_as_the_trainer_scores_them(world):
    """With frames of an option's number and size, which the engine's own processor keeps."""
    pytest.importorskip("av")
    if not world.encoder.family.has_axes:
        pytest.skip("see test_videos_score_as_the_trainer_scores_them")
    frames = world.encoder.processor.video_processor
    kept, frames.size = frames.size, {**dict(frames.size), "shortest_edge": 28 * 28}
    try:
        rules = world.encoder.frame_rules(MediaBounds(max_pixels=28 * 84, video_fps=3))
        video = as_video(film(size=(96, 64)), name="a film", folder=Path())
        media = Media({"video": [video]}).by_rules(rules)
        encoded = world.encoder.encode(prompt(world.encoder, "What falls?", 0, 1), media)
        assert encoded.tensors["video_grid_thw"].tolist() == [[3, 2, 4]]
        assert world.error([encoded])[0] < 1e-5
    finally:
        frames.size = kept


def test_an_update_reaches_pictures_that_were_seen_before(world, monkeypatch):
    world.sync()
    assert world.error(world.prompts)[0] < 1e-5
    perturb(world.tower, 1, 0.05)
    report = world.sync()
    assert report.canary_difference < 1e-4
    assert world.error(world.prompts)[0] < 1e-5
    readable = {p.name for p in world.engine.parameter_manifest() if p.verifiable}
    held = dict(world.actor.model.named_parameters())
    assert world.engine.hash_parameters() == {name: hash_tensor(held[name]) for name in readable}
    # Features of the picture that an encoder cache keeps of older weights are found.
    perturb(world.tower, 2, 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(world.engine.native.llm_engine, "reset_encoder_cache", lambda: None)
        with pytest.raises(WeightSyncError, match="score a prompt with images"):
            world.sync()
    world.sync()
    assert world.error(world.prompts)[0] < 1e-5


def test_a_frozen_tower_stays_in_the_engine(world):
    for parameter in world.tower.parameters():
        parameter.requires_grad_(False)
    canaries = []
    sync = WeightSync(world.engine)
    for seed in (3, 4):
        perturb(world.model.get_decoder(), seed, 0.01)
        canaries.append(sync.sync(module_parameter_source(world.actor)))
    assert canaries[0].num_resident_bytes == 0
    tower_bytes = sum(4 * parameter.numel() for parameter in world.tower.parameters())
    assert canaries[1].num_resident_bytes == tower_bytes
    assert world.error(world.prompts)[0] < 1e-5


def test_a_policy_that_wants_placeholders_samples_none(world):
    forbidden = list(placeholder_ids(world.model.config))
    head = world.model.get_output_embeddings().weight
    with torch.no_grad():
        before = head[forbidden].clone()
        head[forbidden] *= 30
    world.sync()
    error, completions = world.error(world.prompts, SamplingParams(max_tokens=24, n=4, seed=7))
    assert error < 1e-4
    assert not {t for c in completions for t in c.output_token_ids} & set(forbidden)
    assert world.engine.score(world.prompts[1])[0] == 0
    with torch.no_grad():
        head[forbidden] = before
    world.sync()


def test_prompts_that_vllm_reads_otherwise_are_refused(world):
    first = world.prompts[0]
    expanded = replace(first, request_token_ids=first.token_ids)
    with pytest.raises(ValueError, match=r"vLLM reads a prompt with 1 images .* they differ first"):
        world.error([expanded])
    with pytest.raises(ValueError, match="without images and videos"):
        world.error([replace(first, media=Media())])
    assert world.error(world.prompts)[0] < 1e-5


def test_large_pictures_are_scaled_as_the_processor_scales_them(world):
    size = world.encoder.processor.image_processor.size
    large, text = image(448, 448, 5), prompt(world.encoder, "How many?", 1)
    assert world.error([world.encoder.encode(text, Media({"image": [large]}))])[0] < 1e-5
    if not world.encoder.family.has_axes:
        return
    try:
        limits = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
        world.encoder.processor.image_processor.size = limits
        smaller = world.encoder.encode(text, Media({"image": [large]}))
    finally:
        world.encoder.processor.image_processor.size = size
    # The sizes travel with the prompt; without them the engine's own processor is another one.
    assert world.error([smaller])[0] < 1e-5
    with pytest.raises(ValueError, match="sizes or rules of the two processors differ"):
        world.error([replace(smaller, sizes={})])
