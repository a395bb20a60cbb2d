"""Whole runs on rows with and without sounds; default settings find planted faults."""

import pytest
import torch
from safetensors.torch import load_file
from tests.models.audio.sound_world import tone
from tests.runs import rollout_options, steps, train, train_on_ranks, write_inputs

from lightrft.engines.hf import forward as engine_forward
from lightrft.engines.media.inputs import media_inputs
from lightrft.engines.media.sounds import as_wav
from lightrft.stages.parity_limits import ParityError
from lightrft.tools.tiny_media_models import write_tiny_media_model

pytestmark = pytest.mark.shard("vision")

REWARD = """
def score(responses, audios):
    # A function hears what the model hears: samples, and how many are a second.
    assert all(rate == 16000 and wave.ndim == 1 for own in audios for wave, rate in own)
    return [float(len(r) % 3 + len(own)) for r, own in zip(responses, audios)]
"""
# Seconds of the sounds of a row, in turn.
SECONDS = ((1.0,), (), (0.5, 1.5), ())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Rows, sounds, a reward and a model."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = []
    for i in range(8):
        names = [f"{i}_{k}.wav" for k in range(len(SECONDS[i % 4]))]
        for name, seconds in zip(names, SECONDS[i % 4], strict=True):
            (folder / name).write_bytes(as_wav(tone(seconds, 200 + 90 * i), 16000))
        rows.append({"input": "<audio>" * len(names) + f" say {i}", "audios": names})
    write_tiny_media_model(folder / "model", "tiny-qwen2-audio", seed=1)
    return write_inputs(folder, rows, reward=REWARD)


def options(inputs, output, **changes):
    settings = {"fsdp": False, "input_key": "input", "apply_chat_template": True}
    settings |= {"generate_max_len": 6, "prompt_max_len": 256}
    settings |= {"train_batch_size": 16, "micro_train_batch_size": 8}
    return rollout_options(inputs, output_dir=str(output), **settings | changes)


def assert_alike(first, second):
    for one, other in zip(steps(first), steps(second), strict=True):
        for name in ("reward", "policy_loss", "grad_norm", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


@pytest.mark.full
def test_a_run_trains_tower_projector_and_text_packed_as_padded(inputs, tmp_path):
    padded, packed = (tmp_path / name for name in ("padded", "packed"))
    assert train(options(inputs, padded)).verdict.startswith("trained")
    assert all(0 < step["logprob_diff_mean"] < 1e-5 for step in steps(padded))
    before, after = (load_file(f / "model/model.safetensors") for f in (inputs, padded))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    for part in ("audio_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in moved)
    written = {path.name for path in (padded / "model").iterdir()}
    assert written & {"preprocessor_config.json", "processor_config.json"}
    train(options(inputs, packed, packing_samples=True))
    assert_alike(packed, padded)


@pytest.mark.slow
def test_a_rank_without_sounds_takes_the_step_of_one_process(inputs, tmp_path):
    one, two = (tmp_path / name for name in ("one", "two"))
    train(options(inputs, one))
    changes = {"fsdp": True, "packing_samples": True, "micro_train_batch_size": 1}
    train_on_ranks(2, [options(inputs, two, **changes)])
    assert_alike(two, one)


def shifted(mel):
    """Features stand one place later than they belong."""
    return mel.roll(4, -1)


def exchanged(mel):
    """Each row hears the sound of another one."""
    return mel.roll(1, 0)


def faster(mel):
    """A sound that was read at half its rate lasts half as long."""
    return mel.repeat_interleave(2, -1)[..., : mel.shape[-1]]


@pytest.mark.cover(1)
@pytest.mark.parametrize("fault", [shifted, exchanged, faster])
def test_default_settings_find_an_engine_that_hears_something_else(
    fault, inputs, tmp_path, monkeypatch
):
    def faulty(*args, **given):
        found = media_inputs(*args, **given)
        return {n: fault(t) if n == "input_features" else t for n, t in found.items()}

    monkeypatch.setattr(engine_forward, "media_inputs", faulty)
    with pytest.raises(ParityError, match="engine"):
        train(options(inputs, tmp_path / "run"))
