"""Default settings find an engine that sees a film at other times, or another row's film."""

from dataclasses import replace

import pytest
from tests.datasets.media_files import picture
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.runs import train, write_inputs
from tests.trainer.vision_world import REWARD, vision_options

from lightrft.engines.hf import forward as engine_forward
from lightrft.engines.media.inputs import axes_of_rows, media_inputs
from lightrft.stages.parity_limits import ParityError

pytestmark = pytest.mark.shard("vision")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a model, and rows with films of four frames in two seconds."""
    folder = tmp_path_factory.mktemp("films")
    write_tiny_vision_model(folder / "model", "tiny-qwen2.5-vl", seed=1)
    rows = []
    for i in range(4):
        names = [f"{i}_{k}.png" for k in range(4)]
        for k, name in enumerate(names):
            picture(56, 56, seed=4 * i + k).save(folder / name)
        rows.append({"input": f"<video>say {i}", "videos": [{"frames": names, "fps": 2}]})
    return write_inputs(folder, rows, reward=REWARD)


def difference(world, output):
    changes = {"n_samples_per_prompt": 2, "train_batch_size": 8, "micro_train_batch_size": 4}
    options = vision_options(world, world / "model", output, max_steps=1, **changes)
    return train(options).last_metrics["logprob_diff_mean"]


@pytest.mark.full
def test_engine_and_trainer_see_one_film(world, tmp_path):
    assert 0 < difference(world, tmp_path / "run") < 1e-5


@pytest.mark.full
def test_frames_at_other_times_are_found(world, tmp_path, monkeypatch):
    def slower(prompt):
        tensors = dict(prompt.tensors)
        tensors["second_per_grid_ts"] = 4 * tensors["second_per_grid_ts"]
        return replace(prompt, tensors=tensors)

    def faulty(trunk, rows, prompts):
        return axes_of_rows(trunk, rows, [prompt and slower(prompt) for prompt in prompts])

    monkeypatch.setattr(engine_forward, "axes_of_rows", faulty)
    with pytest.raises(ParityError, match="engine"):
        difference(world, tmp_path / "run")


@pytest.mark.parametrize("places", [32, 1])
def test_another_row_s_film_or_shifted_patches_are_found(places, world, tmp_path, monkeypatch):
    def faulty(*args, **given):
        found = media_inputs(*args, **given)
        pixels = "pixel_values_videos"
        return {n: t.roll(places * (n == pixels), 0) for n, t in found.items()}

    monkeypatch.setattr(engine_forward, "media_inputs", faulty)
    with pytest.raises(ParityError, match="engine"):
        difference(world, tmp_path / "run")
