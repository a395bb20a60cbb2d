"""Default settings find an engine that sees a film at other times, or another row's film."""

import json
from dataclasses import replace

import pytest
from tests.datasets.media_files import picture
from tests.models.vision.tiny_families import write_tiny_vision_model

from lightrft.config import TrainConfig
from lightrft.engines.hf import forward as engine_forward
from lightrft.engines.media.inputs import axes_of_rows, media_inputs
from lightrft.run.assembly import run_training
from lightrft.stages.policy.parity import ParityError

pytestmark = pytest.mark.shard("vision")
REWARD = "def reward(responses):\n    return [float(len(r) % 3) for r in responses]\n"


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
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(world, output):
    config = TrainConfig().replaced(
        {
            "pretrain": str(world / "model"),
            "prompt_data": str(world / "rows.jsonl"),
            "reward_fn": (f"{world / 'reward.py'}:reward",),
            "apply_chat_template": True,
            "generate_max_len": 6,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "train_batch_size": 8,
            "micro_train_batch_size": 4,
            "max_steps": 1,
            "engine_type": "hf",
            "output_dir": str(output),
        }
    )
    return run_training(config).last_metrics["logprob_diff_mean"]


def test_engine_and_trainer_see_one_film(world, tmp_path):
    assert 0 < train(world, tmp_path / "run") < 1e-5


def test_frames_at_other_times_are_found(world, tmp_path, monkeypatch):
    def slower(prompt):
        tensors = dict(prompt.tensors)
        tensors["second_per_grid_ts"] = 4 * tensors["second_per_grid_ts"]
        return replace(prompt, tensors=tensors)

    def faulty(trunk, rows, prompts):
        return axes_of_rows(trunk, rows, [prompt and slower(prompt) for prompt in prompts])

    monkeypatch.setattr(engine_forward, "axes_of_rows", faulty)
    with pytest.raises(ParityError, match="engine"):
        train(world, tmp_path / "run")


@pytest.mark.parametrize("places", [32, 1])
def test_another_row_s_film_or_shifted_patches_are_found(places, world, tmp_path, monkeypatch):
    def faulty(*args, **given):
        found = media_inputs(*args, **given)
        pixels = "pixel_values_videos"
        return {n: t.roll(places * (n == pixels), 0) for n, t in found.items()}

    monkeypatch.setattr(engine_forward, "media_inputs", faulty)
    with pytest.raises(ParityError, match="engine"):
        train(world, tmp_path / "run")
