"""Whole runs with the real vLLM on images: those that agree, and those that the gates end."""

import pytest
from tests.models.vision.tiny_world import tiny
from tests.ranks import run_multiprocess
from tests.runs import lines, train
from tests.trainer.vision_world import vision_options, write_data

from lightrft.models.loading import save_pretrained

pytestmark = [pytest.mark.shard("vision_vllm"), pytest.mark.vllm]


def run(preset, folder, **options):
    # Every weight of it matters, so that images are told apart.
    model, encoder = tiny(preset)
    save_pretrained(model, None, folder / "model")
    encoder.processor.save_pretrained(folder / "model")
    data = write_data(folder)
    changes = {"prompt_max_len": 200, "engine_type": "vllm", **options}
    return train(vision_options(data, folder / "model", folder / "out", **changes))


def end_of_run(rank, world_size, preset, folder, options):
    """What a run ended with; vLLM leaves process groups, so each has a process of its own."""
    try:
        return run(preset, folder, **options).verdict
    except Exception as error:  # noqa: BLE001 - its text is compared
        return f"{type(error).__name__}: {error}"


def end_of(preset, folder, **options):
    (found,) = run_multiprocess(end_of_run, 1, timeout_seconds=280, args=(preset, folder, options))
    return found


def test_a_run_stays_in_step_with_vllm(tmp_path):
    """With images smaller than the saved processor's: the sizes reach vLLM."""
    assert end_of("tiny-qwen2.5-vl", tmp_path, max_pixels=56 * 84).startswith("trained")
    steps = lines(tmp_path / "out/metrics.jsonl")
    assert len(steps) == 2
    assert all(step["logprob_diff_mean"] < 1e-5 for step in steps)


@pytest.mark.slow
def test_a_family_that_vllm_computes_otherwise_is_ended_by_the_gate(tmp_path):
    """vLLM attends causally within an image of Gemma 3 on a CPU."""
    found = end_of("tiny-gemma3", tmp_path)
    assert found.startswith("ParityError")
    assert "outputs differ first in model.language_model.layers.0 " in found


@pytest.mark.slow
def test_a_prompt_that_vllm_reads_otherwise_ends_the_run(tmp_path):
    """Two images of Llava-OneVision: vLLM cuts tiles where transformers takes whole images."""
    found = end_of("tiny-llava-onevision", tmp_path)
    assert "vLLM reads a prompt with 2 images and 0 videos" in found
    assert "differ first at token" in found
