"""The first look of an update at rows with images is the look before it."""

from dataclasses import replace

import pytest
import torch
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.trainer.vision_world import build_vision_trainer

from lightrft.engines.media.media import RowMedia
from lightrft.models.vision import forward
from lightrft.stages.policy import updates

# Of one forward pass computed twice, and of passes over the same rows in other company.
SAME, REGROUPED = 1e-6, 1e-5


@pytest.fixture(scope="module")
def build(data, tmp_path_factory):
    """A trainer of a family, one for all tests of it; and its layout is chosen anew."""
    built = {}

    def trainer_of(preset, *, is_packed=False, micro_rollout_batch_size=4):
        key = preset, micro_rollout_batch_size
        if key not in built:
            path = tmp_path_factory.mktemp("model")
            write_tiny_vision_model(path, preset, seed=1)
            built[key] = build_vision_trainer(
                str(path),
                data,
                is_fake=True,
                max_epochs=2,
                actor_learning_rate=1e-4,
                micro_train_batch_size=4,
                micro_rollout_batch_size=micro_rollout_batch_size,
            )
        trainer, strategy = built[key]
        strategy.unwrap_model(trainer.actor).pack_samples(is_packed)
        return trainer

    yield trainer_of
    for _, strategy in built.values():
        strategy.close()


def log_ratios(trainer, monkeypatch, plant=None):
    """Largest log ratio of the rows with media and of the rows of text, in each epoch.

    Args:
        trainer: Takes a step of two epochs, with one optimizer batch of 16 rows.
        plant: Called with the trainer between the experience and the update.
    """
    batch = trainer.make_experience()
    assert batch.outputs.old_logprobs is not None
    if plant is not None:
        plant(trainer)
    seen, found = [], []
    record = updates.record_ratios

    def recording(token_loss, logprobs, old_logprobs, mask, metrics):
        gaps = torch.where(mask, logprobs.detach() - old_logprobs, 0.0).abs().amax(dim=1)
        found.extend(zip([p is not None for p in seen[-1]], gaps.tolist(), strict=True))
        record(token_loss, logprobs, old_logprobs, mask, metrics)

    def look(module, args, given):
        seen.append(given["media"].prompts if "media" in given else ())

    monkeypatch.setattr(updates, "record_ratios", recording)
    hook = trainer.strategy.unwrap_model(trainer.actor).register_forward_pre_hook(
        look, with_kwargs=True
    )
    trainer.ppo_train(0)
    hook.remove()
    assert len(found) == 32
    return [
        [max(gap for has_media, gap in epoch if has_media == kind) for kind in (True, False)]
        for epoch in (found[:16], found[16:])
    ]


def other_pixels(trainer):
    """Fault: the update sees images in negative."""
    step, drawn = trainer.pending

    def negative(prompt):
        tensors = {n: -t if t.is_floating_point() else t for n, t in prompt.tensors.items()}
        return replace(prompt, tensors=tensors)

    experience = drawn.experience
    media = experience.batch.rollouts.media
    wrong = RowMedia(tuple(p and negative(p) for p in media.prompts), media.present)
    rollouts = replace(experience.batch.rollouts, media=wrong)
    experience = replace(experience, batch=replace(experience.batch, rollouts=rollouts))
    trainer.pending = step, replace(drawn, experience=experience)


def places_by_count(trunk, rows, prompts):
    """Fault: images take as many places as they have tokens."""
    return [torch.arange(len(row)).expand(3, -1) for row in rows]


padded_and_packed = pytest.mark.parametrize("is_packed", [False, True])


@pytest.mark.cover(2)
@padded_and_packed
@pytest.mark.parametrize("preset", ["tiny-qwen2.5-vl", "tiny-gemma3"])
def test_ratios_are_one_until_the_first_step(preset, is_packed, build, monkeypatch):
    first, second = log_ratios(build(preset, is_packed=is_packed), monkeypatch)
    assert max(first) <= SAME
    # Positive control: after the step they are not.
    assert min(second) > 1e-3


def test_ratios_are_one_if_rows_were_scored_in_other_company(build, monkeypatch):
    first, _ = log_ratios(build("tiny-qwen2.5-vl", micro_rollout_batch_size=16), monkeypatch)
    assert max(first) <= REGROUPED


@padded_and_packed
def test_other_pixels_in_the_update_are_seen(is_packed, build, monkeypatch):
    trainer = build("tiny-qwen2.5-vl", is_packed=is_packed)
    (media, text), _ = log_ratios(trainer, monkeypatch, other_pixels)
    assert text <= SAME
    assert media > 0.01


@padded_and_packed
def test_other_positions_in_the_update_are_seen(is_packed, build, monkeypatch):
    trainer = build("tiny-qwen2.5-vl", is_packed=is_packed)
    right, sync = forward.axes_of_rows, trainer.strategy.update_engine_weights

    def plant(_):
        monkeypatch.setattr(forward, "axes_of_rows", places_by_count)

    def right_sync(actor):
        # The engine does not agree with such an actor.
        monkeypatch.setattr(forward, "axes_of_rows", right)
        return sync(actor)

    monkeypatch.setattr(trainer.strategy, "update_engine_weights", right_sync)
    (media, text), _ = log_ratios(trainer, monkeypatch, plant)
    assert text <= SAME
    assert media > 0.01
