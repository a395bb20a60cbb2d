"""What a run writes for the audit beside the two states."""

from __future__ import annotations

from safetensors.numpy import load_file

from lightrft.tools.audit.record import FACTS, SAMPLES, VALUES, read_record

NUM_SAMPLES, NUM_TOKENS = 128, 4000
# All that is recorded of a token: of actor, critic, reference and correction, in two epochs.
COSTLY = {
    "advantage_estimator": "gae",
    "init_kl_coef": 0.1,
    "off_policy_correction": "tis",
    "high_entropy_token_ratio": 0.5,
    "max_epochs": 2,
}


def test_a_step_of_128_samples_takes_less_than_50_megabytes(world, micro_model, tmp_path):
    world.record_step(micro_model, tmp_path / "run", COSTLY)
    record = read_record(tmp_path / "run")
    names = (SAMPLES, VALUES)
    arrays = [array for name in names for array in load_file(record.folder / name).values()]
    num_bytes = sum(array.nbytes for array in arrays)
    # Numbers of a row are counted as if there were as many as tokens.
    whole = num_bytes / record.samples.token_ids.size * NUM_SAMPLES * NUM_TOKENS
    print(f"{whole / 1e6:.1f} MB for {NUM_SAMPLES} samples of {NUM_TOKENS} tokens")
    assert 20e6 < whole < 50e6  # ten numbers of four bytes are 20.5 MB
    on_disk = sum((record.folder / name).stat().st_size for name in (*names, FACTS))
    assert on_disk - num_bytes < 20_000  # names, shapes and facts
