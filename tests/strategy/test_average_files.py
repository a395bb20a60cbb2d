"""A moving average in a checkpoint is read by any number of ranks, masters included."""

import pytest
import torch
from safetensors.torch import load_file

from lightrft.strategy import get_fake_strategy
from lightrft.strategy.checkpoints import moving_averages
from lightrft.strategy.checkpoints.files import FileWriter
from lightrft.strategy.checkpoints.moving_averages import MovingAverages
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.weight_sync.parameter_source import (
    ParameterSource,
    SourceParameter,
    chunk_ranges,
)


def source_of(rank, num_ranks, values, dtype=torch.float32):
    """What rank holds of parameters that are divided flat, "whole" excepted."""
    entries = []
    for name, value in values.items():
        shards = chunk_ranges((value.numel(),), 1 if name == "whole" else num_ranks)
        start, stop = shards[rank if len(shards) > 1 else 0]
        shard = value.flatten()[start:stop].to(dtype).clone()
        entries.append(SourceParameter(name, tuple(value.shape), shards, shard, frozen=True))
    return ParameterSource(torch.nn.Module(), tuple(entries))


def master_of(averages, average, folder):
    """What is averaged, as it is saved."""
    averages.save(folder, average, FileWriter(), rank=0)
    return load_file(folder / "average/rank_00000.safetensors")["w"]


@pytest.mark.parametrize("num_writers, num_readers", [(1, 1), (1, 3), (3, 2), (4, 1)])
def test_ranges_of_any_number_of_ranks(tmp_path, monkeypatch, num_writers, num_readers):
    values = {"a": torch.randn(3, 5), "b": torch.randn(2), "whole": torch.randn(4)}
    rank_now = [0]
    monkeypatch.setattr(moving_averages, "local_rank_in", lambda group: rank_now[0])
    for rank_now[0] in range(num_writers):
        source = source_of(rank_now[0], num_writers, values)
        MovingAverages().save(tmp_path, source, FileWriter(), rank=rank_now[0])
    for rank_now[0] in range(num_readers):
        source = source_of(rank_now[0], num_readers, values)
        zeros = {name: torch.zeros_like(value) for name, value in values.items()}
        found = source_of(rank_now[0], num_readers, zeros)
        MovingAverages().load(tmp_path, found)
        for read, expected in zip(found.parameters(), source.parameters(), strict=True):
            assert read.local_shard.equal(expected.local_shard)
    (tmp_path / "average" / f"rank_{num_writers - 1:05d}.safetensors").unlink()
    rank_now[0] = num_readers - 1
    with pytest.raises(CheckpointError, match=r"no shards in|lacks"):
        MovingAverages().load(tmp_path, source_of(rank_now[0], num_readers, values))


def test_masters_of_a_bfloat16_average_continue_bit_for_bit(tmp_path):
    weights = {"w": torch.randn(64)}
    model = source_of(0, 1, {"w": weights["w"] + 1})
    average = source_of(0, 1, weights, torch.bfloat16)
    averages = MovingAverages()
    averages.update(model, average, beta=0.999)
    averages.save(tmp_path, average, FileWriter(), rank=0)
    other, resumed = source_of(0, 1, {"w": torch.zeros(64)}, torch.bfloat16), MovingAverages()
    resumed.load(tmp_path, other)
    rounded_only = MovingAverages()
    third = source_of(0, 1, {"w": average.entries[0].local_shard.float()}, torch.bfloat16)
    for _ in range(3):
        averages.update(model, average, beta=0.999)
        resumed.update(model, other, beta=0.999)
        rounded_only.update(model, third, beta=0.999)
    average, other, third = (
        master_of(*pair, tmp_path)
        for pair in ((averages, average), (resumed, other), (rounded_only, third))
    )
    assert other.equal(average)
    # Without the masters the average would not continue where it was.
    assert not third.equal(average)


def test_a_checkpoint_without_an_average_says_so(tmp_path):
    strategy = get_fake_strategy()
    model = torch.nn.Linear(2, 2)
    strategy.save_ckpt(model, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds no moving average: .* start a new run"):
        strategy.load_ckpt(model, str(tmp_path), model_ema=torch.nn.Linear(2, 2))
