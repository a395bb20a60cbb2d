"""Whole runs on rows with and without sounds; default settings find planted faults."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.models.audio.sound_world import tone
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig
from lightrft.engines.hf import forward as engine_forward
from lightrft.engines.media.inputs import media_inputs
from lightrft.engines.media.sounds import as_wav
from lightrft.run.assembly import run_training
from lightrft.stages.policy.parity import ParityError
from lightrft.tools.tiny_audio_models import write_tiny_audio_model

pytestmark = pytest.mark.shard("vision")

REWARD = """
def reward(responses, audios):
    # A function hears what the model hears: samples, and how many are a second.
    assert all(rate == 16000 and wave.ndim == 1 for own in audios for wave, rate in own)
    return [float(len(r) % 3 + len(own)) for r, own in zip(responses, audios)]
"""
# Seconds of the sounds of a row, in turn.
SECONDS = ((1.0,), (), (0.5, 1.5), ())
COMPARED = ("reward", "policy_loss", "grad_norm", "entropy", "logprob_diff_mean")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for i in range(8):
        names = [f"{i}_{k}.wav" for k in range(len(SECONDS[i % 4]))]
        for name, seconds in zip(names, SECONDS[i % 4], strict=True):
            (folder / name).write_bytes(as_wav(tone(seconds, 200 + 90 * i), 16000))
        rows.append({"input": "<audio>" * len(names) + f" say {i}", "audios": names})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_audio_model(path, seed=1)
    return str(path)


def train(rank, world_size, data, model, output, options):
    config = TrainConfig().replaced(
        {
            "pretrain": model,
            "prompt_data": str(data / "train.jsonl"),
            "reward_fn": (f"{data / 'reward.py'}:reward",),
            "apply_chat_template": True,
            "generate_max_len": 6,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "train_batch_size": 16,
            "micro_train_batch_size": 8,
            "max_steps": 2,
            "actor_learning_rate": 1e-3,
            "engine_type": "hf",
            "output_dir": str(output),
            **options,
        }
    )
    verdict = run_training(config).verdict
    lines = (output / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    steps = [json.loads(line) for line in lines]
    return verdict, [{name: step[name] for name in COMPARED} for step in steps]


@pytest.mark.full
def test_a_run_trains_tower_projector_and_text_packed_as_padded(data, model, tmp_path):
    verdict, steps = train(0, 1, data, model, tmp_path / "padded", {})
    assert verdict.startswith("trained")
    assert all(0 < step["logprob_diff_mean"] < 1e-5 for step in steps)
    before = load_file(f"{model}/model.safetensors")
    after = load_file(tmp_path / "padded" / "model" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    for part in ("audio_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in moved)
    assert (tmp_path / "padded" / "model" / "preprocessor_config.json").exists() or (
        tmp_path / "padded" / "model" / "processor_config.json"
    ).exists()
    _, packed = train(0, 1, data, model, tmp_path / "packed", {"packing_samples": True})
    for one, other in zip(packed, steps, strict=True):
        for name in COMPARED[:-1]:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_without_sounds_takes_the_step_of_one_process(data, model, tmp_path):
    _, expected = train(0, 1, data, model, tmp_path / "one", {})
    options = {"fsdp": True, "packing_samples": True, "micro_train_batch_size": 1}
    args = (data, model, tmp_path / "two", options)
    _, found = run_multiprocess(train, 2, timeout_seconds=280, args=args)[0]
    for one, other in zip(found, expected, strict=True):
        for name in COMPARED[:-1]:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def shifted(mel):
    """Features stand one place later than they belong."""
    return mel.roll(4, -1)


def exchanged(mel):
    """Each row hears the sound of another one."""
    return mel.roll(1, 0)


def faster(mel):
    """A sound that was read at half its rate lasts half as long."""
    return mel.repeat_interleave(2, -1)[..., : mel.shape[-1]]


@pytest.mark.parametrize("fault", [shifted, exchanged, faster])
def test_default_settings_find_an_engine_that_hears_something_else(
    fault, data, model, tmp_path, monkeypatch
):
    def faulty(*args, **given):
        found = media_inputs(*args, **given)
        return {n: fault(t) if n == "input_features" else t for n, t in found.items()}

    monkeypatch.setattr(engine_forward, "media_inputs", faulty)
    with pytest.raises(ParityError, match="engine"):
        train(0, 1, data, model, tmp_path / "run", {})
