"""Processes, groups and generation over ranks; one spawn per world size runs all checks."""

import contextlib
import io
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.engines.fake_engine import FakeEngine
from tests.ranks import RankFailure, run_multiprocess

from lightrft.config import ConfigError
from lightrft.engines.types import EngineStatus
from lightrft.strategy import FakeStrategy
from lightrft.strategy.distributed import process_groups
from lightrft.strategy.distributed.context import console_sink
from lightrft.strategy.distributed.process_groups import (
    accumulation_steps,
    engine_group_ranks,
    resolve_device,
    resolve_local_rank,
    resolve_shard_size,
    start_process_group,
)


def sharded(**settings):
    """A strategy over real processes and groups."""
    from lightrft.strategy import get_strategy

    config = {"train_batch_size": 8, "micro_train_batch_size": 1, "fsdp": True, "bf16": False}
    return get_strategy({**config, **settings})


class Spanning(FakeEngine):
    """An engine whose group generates together, every rank of it."""

    name = "vllm"
    runs_on_every_rank = True


class Leading(FakeEngine):
    """An engine that runs on the first rank of its group only."""

    name = "sglang"
    runs_on_every_rank = False


def echo(request, index):
    text = request.prompt_text or ""
    media = len(request.multi_modal.images)
    return [sum(request.prompt_token_ids), len(text), media, index], [-0.5] * 4


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("world, tp", [(4, 2), (4, 1), (4, 4), (8, 4)])
def test_an_engine_has_neighbouring_ranks_and_data_groups_one_of_each(world, tp):
    together = [list(range(first, first + tp)) for first in range(0, world, tp)]
    apart = [list(range(place, world, tp)) for place in range(tp)]
    assert engine_group_ranks(world, tp) == (together, apart)


def test_shard_sizes_are_divisors_of_the_ranks():
    for size, expected in {-1: 4, 8: 4, 4: 4, 2: 2, 1: 1}.items():
        assert resolve_shard_size(size, 4) == expected
    for size in (3, 0, -2):
        with pytest.raises(ValueError, match="shard_size"):
            resolve_shard_size(size, 4)


def steps(train, data_ranks):
    return accumulation_steps(
        train_batch_size=train, micro_train_batch_size=2, num_data_ranks=data_ranks, world_size=4
    )


def test_accumulation_counts_data_parallel_ranks():
    assert (steps(16, 4), steps(16, 2)) == (2, 4)


@pytest.mark.parametrize("train, nearest", [(10, "8 or 16"), (3, "8"), (17, "16 or 24")])
def test_an_indivisible_batch_shows_the_nearest_legal_ones(train, nearest):
    with pytest.raises(ValueError, match=rf"{train} % \(2 \* 4\) == 0") as caught:
        steps(train, 4)
    assert str(caught.value).endswith(f"Nearest legal train_batch_size: {nearest}")


@pytest.mark.parametrize(
    "configured, environment, expected",
    [
        (-1, {}, -1),
        (-1, {"LOCAL_RANK": "3", "RANK": "11"}, 3),
        (-1, {"RANK": "11"}, 3),
        (2, {"LOCAL_RANK": "3", "RANK": "11"}, 2),
        (2, {"RANK": "11"}, 2),
        (0, {"RANK": "11"}, 0),
    ],
)
def test_local_rank(monkeypatch, configured, environment, expected):
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_local_rank(configured, 8) == expected


@pytest.mark.parametrize("name, value", [("WORLD_SIZE", "4"), ("RANK", "1")])
def test_a_running_group_of_another_size_is_named(monkeypatch, name, value):
    for asked, answer in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(dist, asked, lambda answer=answer: answer)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start_process_group(None) is False
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"rank 0 of 2 already.*{name}={value}.*close"):
        start_process_group(None)


def test_a_rank_beyond_the_world_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError, match="RANK must be in"):
        start_process_group(None)


@pytest.mark.parametrize("name", ["sp_size", "engine_tp_size"])
def test_group_sizes_cannot_change_after_the_groups_were_formed(name):
    strategy = FakeStrategy()
    strategy.setup_distributed()
    setattr(strategy.config, name, 2)
    with pytest.raises(ValueError, match=f"groups with {name} 1 on 1 ranks .* is 2: .*close"):
        strategy.setup_distributed()


# ------------------------------------------------------------------ several processes


def check_identity(strategy, rank, world_size):
    assert strategy.world_size == dist.get_world_size() == world_size
    assert strategy.get_rank() == rank
    assert strategy.is_rank_0() == (rank == 0)
    assert strategy.config.local_rank == rank
    assert strategy.accumulated_gradient == 8 // world_size
    strategy.setup_distributed(timedelta(seconds=60))
    strategy.setup_distributed()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        strategy.print("hello", rank)
        strategy.report_memory("place")
    assert ("hello 0" in printed.getvalue()) == (rank == 0)
    assert ("[StrategyINFO" in printed.getvalue()) == (rank == 0)
    strategy.sync_and_clear_cache()
    total = world_size * (world_size - 1) // 2
    assert strategy.gather_objects(strategy.all_reduce(rank, "sum")) == [total] * world_size


def check_accumulation(strategy, rank):
    model = torch.nn.Linear(2, 2)
    optimizer = strategy.create_optimizer(model)
    counts_differ = pytest.raises(
        ValueError, match=r"same positive number on all ranks: got \[1, 2"
    )
    with counts_differ, strategy.accumulation(rank + 1, optimizer):
        raise AssertionError("not reached")


def prompts_of(rank):
    """A different number of prompts on every rank, none on rank 1."""
    return [[100 * rank + i, 7] for i in range([3, 0, 1, 2][rank])]


def with_engine(engine_class, tp, script=echo, **settings):
    strategy = sharded(engine_tp_size=tp, **settings)
    strategy.inference_engine = engine = engine_class(script=script)
    return strategy, engine


def check_generation(rank, world_size, tp, engine_class):
    strategy, engine = with_engine(engine_class, tp, plot_every=1)
    mine = prompts_of(rank)
    lines = []
    with console_sink(lambda text, _: lines.append(text)):
        found = strategy.gather_and_generate({"n": 2, "max_tokens": 8}, mine)
    assert [(c.prompt_token_ids, c.sample_index) for c in found] == [
        (tuple(prompt), index) for prompt in mine for index in range(2)
    ]
    assert [c.output_token_ids[:2] for c in found] == [(sum(p), 0) for p in mine for _ in range(2)]
    ids = strategy.gather_objects(sorted({c.request_id for c in found}))
    total = sum(len(prompts_of(r)) for r in range(world_size))
    assert sorted(i for part in ids for i in part) == list(range(total))
    assert engine.status is EngineStatus.SLEEPED
    if rank == 0:
        assert f"total_samples={2 * total}" in " ".join(lines)
    is_alone = tp == 1 or engine_class is FakeEngine
    leads = engine_class is not Leading or tp == 1 or rank % tp == 0
    group = [rank] if is_alone else range(rank // tp * tp, rank // tp * tp + tp)
    expected = sum(len(prompts_of(r)) for r in group) if leads else 0
    assert len(engine.requests) == expected, (engine_class, tp, rank, engine.requests, expected)
    assert engine.calls.count("generate") == (1 if expected else 0)


def check_one_rank_with_images(rank, tp, engine_class):
    strategy, engine = with_engine(engine_class, tp)
    images = ["picture"] if rank == 0 else [None]
    found = strategy.gather_and_generate({}, [[rank, 5]], all_prompts=["text"], all_images=images)
    assert [c.output_token_ids[:3] for c in found] == [(rank + 5, 4, 1 if rank == 0 else 0)]
    texts = {r.prompt_text for r in engine.requests}
    assert texts <= {"text"}


def check_failure_is_shared(rank, tp, engine_class):
    def script(request, index):
        if request.prompt_token_ids[0] == 0:
            raise ArithmeticError("planted")
        return echo(request, index)

    strategy, engine = with_engine(engine_class, tp, script)
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        strategy.gather_and_generate({}, [[rank]])
    notes = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "rank 0: ArithmeticError: planted" in notes
    assert engine.status is EngineStatus.SLEEPED
    with pytest.raises((ValueError, RuntimeError), match="top_p"):
        strategy.gather_and_generate({"top_p": 5.0 if rank == 1 else 1.0}, [[rank + 1]])
    assert len(strategy.gather_and_generate({}, [[rank + 1]])) == 1


def check_groups(rank, world_size):
    expected = {
        1: ([rank], list(range(world_size))),
        2: (list(range(rank // 2 * 2, rank // 2 * 2 + 2)), list(range(rank % 2, world_size, 2))),
        world_size: (list(range(world_size)), [rank]),
    }
    for tp, (mp, dp) in expected.items():
        strategy = sharded(engine_tp_size=tp)
        assert dist.get_process_group_ranks(strategy.engine_mp_group) == mp
        assert dist.get_process_group_ranks(strategy.engine_dp_group) == dp
    with pytest.raises(ValueError, match="engine_tp_size 3"):
        sharded(engine_tp_size=3)


def check_sequence_parallel(rank, world_size):
    strategy = sharded(sp_size=2)
    assert strategy.sp_mesh_device.mesh_dim_names == ("dp", "sp")
    assert strategy.sp_mesh_device.mesh.tolist() == [
        [2 * i, 2 * i + 1] for i in range(world_size // 2)
    ]
    assert strategy.accumulated_gradient == 8 // (world_size // 2)
    mine = [f"{rank}.{i}" for i in range(rank % 2 * 3 + 1)]
    union = strategy.sp_data_processor.preprocess(mine)
    first = rank // 2 * 2
    assert union == [f"{first}.0", *(f"{first + 1}.{i}" for i in range(4))]
    assert strategy.sp_data_processor.postprocess(union) == mine
    with pytest.raises(ValueError, match="5 items"):
        strategy.sp_data_processor.postprocess(union[:-1])
    with pytest.raises(ValueError, match="sp_size 3"):
        sharded(sp_size=3)


def run_two_ranks(rank, world_size):
    strategy = sharded()
    check_identity(strategy, rank, world_size)
    check_accumulation(strategy, rank)
    check_sequence_parallel(rank, world_size)
    for engine_class in (FakeEngine, Spanning, Leading):
        for tp in (1, 2):
            check_generation(rank, world_size, tp, engine_class)
            check_one_rank_with_images(rank, tp, engine_class)
            check_failure_is_shared(rank, tp, engine_class)


def run_four_ranks(rank, world_size):
    strategy = sharded()
    check_identity(strategy, rank, world_size)
    check_groups(rank, world_size)
    check_sequence_parallel(rank, world_size)
    for engine_class in (Spanning, Leading):
        check_generation(rank, world_size, 2, engine_class)
    check_generation(rank, world_size, 4, Spanning)
    strategy.close()
    assert not dist.is_initialized()


def hang_on_one_rank(rank, world_size):
    from lightrft.strategy.distributed.deadlines import phase

    sharded()
    if rank == 1:
        with phase("reward", 60):
            time.sleep(60)
    with phase("generate", 3):
        # Deadlines of both ranks are far away for rank 1.
        os.environ["UNUSED"] = "1"
        dist.barrier()


def test_two_ranks():
    run_multiprocess(run_two_ranks, 2, timeout_seconds=150)


def test_four_ranks():
    run_multiprocess(run_four_ranks, 4, timeout_seconds=200)


@pytest.mark.full
def test_expired_phase_names_the_phases_of_all_ranks(capfd):
    with pytest.raises(RankFailure, match="exit code 7"):
        run_multiprocess(hang_on_one_rank, 2, timeout_seconds=60)
    printed = capfd.readouterr().err
    assert "rank 0 spent more than 3 s in phase 'generate'" in printed
    assert "rank 1: reward" in printed


def plant_gpus(monkeypatch, count, side=None):
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(process_groups, "_SIDES", [] if side is None else [side])


def test_a_rank_beyond_the_gpus_is_refused_with_the_option_that_shares_them(monkeypatch):
    side = process_groups.Side(1, 1, 1)
    plant_gpus(monkeypatch, 1, side)
    with pytest.raises(ConfigError, match=r"local rank 1 has no GPU: .* add devices_shared"):
        resolve_device(1)
    assert resolve_device(1, devices_shared=True) == torch.device("cuda", 0)
    plant_gpus(monkeypatch, 2, process_groups.Side(3, 2, 2))
    found = [resolve_device(rank, devices_shared=True).index for rank in range(4)]
    assert found == [0, 1, 0, 1]


def test_gpus_are_shared_by_one_rank_of_each_side_only(monkeypatch):
    """NCCL refuses two ranks of one GPU in the group of a side."""
    plant_gpus(monkeypatch, 1, process_groups.Side(1, 2, 1))
    with pytest.raises(ConfigError, match=r"local rank 1 has no GPU: .* at most 1 ranks on each"):
        resolve_device(1, devices_shared=True)
    plant_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"start at most 1 processes per node$"):
        resolve_device(1, devices_shared=True)
    plant_gpus(monkeypatch, 0)
    assert resolve_device(5, devices_shared=True) == torch.device("cpu")
