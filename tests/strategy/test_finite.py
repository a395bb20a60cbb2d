"""Values that are not finite end every rank, by name, and nothing that holds them is written."""

import math
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import make, prepared
from torch import nn

from lightrft.engines import EngineConfig
from lightrft.engines.hf.engine import HFEngine
from lightrft.models import Actor
from lightrft.strategy.distributed.collectives import nonfinite_names
from lightrft.strategy.distributed.process_end import NumericsError
from lightrft.strategy.distributed.process_groups import start_process_group
from lightrft.strategy.weight_sync.sync import WeightSync

# A checkpoint is written in the background where the name says so.
CASES = ("fake", "fsdp2", "fsdp2 background", "zero1", "zero2", "zero2 background", "zero3")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_named_wherever_it_stands(bad, dtype):
    good = torch.randn(3, 1001).to(dtype)
    tensors = {"good": good, "empty": good[:0], "count": torch.tensor([1]), "one": good[0, 0]}
    assert nonfinite_names(tensors.items()) == []
    for index in (0, 17, 1000):
        spoilt = good.clone()
        spoilt[1, index] = bad
        assert nonfinite_names([*tensors.items(), ("bad", spoilt), ("view", spoilt[:, index])]) == [
            "bad",
            "view",
        ]


def test_what_overflows_where_it_is_sent_is_not_finite():
    values = torch.tensor([1e5, -1.0])
    assert nonfinite_names([("w", values)]) == []
    assert nonfinite_names([("w", values)], dtypes=[torch.float16]) == ["w"]
    assert nonfinite_names([("w", values)], dtypes=[torch.bfloat16]) == []


def parts_of(backend, model, ready):
    """Storage of one weight on this rank: what the forward pass uses, and the optimizer's."""
    parameter = dict(model.named_parameters())["1.weight"].detach()
    if backend == "fsdp2":
        return [parameter.to_local()]
    if not backend.startswith("zero"):
        return [parameter]
    used = dict(model.named_parameters())["1.weight"]
    masters = vars(ready.model.optimizer).get("fp32_partitioned_groups_flat", ())  # stage 3
    masters = [*masters, *(p for group in ready.optimizer.param_groups for p in group["params"])]
    masters = [master.data for master in masters]
    return [vars(used).get("ds_tensor", used).data, *masters]


def message(action):
    try:
        action()
    except NumericsError as error:
        return str(error)
    return None


def spoil_and_save(name, folder):
    """What every way out says of a value that only the last rank holds."""
    backend, _, background = name.partition(" ")
    with make(backend, async_save=bool(background)) as strategy:
        rank, world_size = strategy.get_rank(), strategy.world_size
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        ready = prepared(strategy, model)
        with strategy.accumulation(1, ready.optimizer):
            loss = ready.model(torch.ones(2, 4)).square().mean()
            strategy.backward(loss, ready.model, ready.optimizer)
            strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler)

        def save(tag):
            strategy.save_ckpt(ready, f"{folder}/checkpoints", tag, 1)

        save("good")
        strategy.finish_saving()
        strategy.require_finite(ready)
        module = strategy.unwrap_model(ready.model)
        parts = parts_of(backend, module, ready)
        kept = [part.clone() for part in parts]
        for index, part in enumerate(parts):
            # Whole weights are equal on all ranks, as the optimizer leaves them.
            if rank == world_size - 1 or (index == 0 and backend in ("zero1", "zero2")):
                part.view(-1)[0] = math.nan
        said = {
            "weights": message(lambda: strategy.require_finite(ready)),
            "checkpoint": message(lambda: save("bad")),
            "model": message(lambda: strategy.save_model(ready, None, f"{folder}/model")),
        }
        for part, values in zip(parts, kept, strict=True):
            part.copy_(values)
        states = [
            state for state in ready.optimizer.state.values() if state.get("exp_avg") is not None
        ]
        if rank == world_size - 1:
            value = states[0]["exp_avg"]
            (value.to_local() if hasattr(value, "to_local") else value).view(-1)[0] = math.inf
        said["optimizer"] = message(lambda: save("bad"))
        strategy.finish_saving()
        return said


def sync_spoilt():
    """What a sync says of a weight that only the last rank holds, and then of a sound one."""
    with make("fsdp2") as strategy:
        actor = strategy.prepare_model(Actor(tiny_model()), is_training=True)
        engine = HFEngine(EngineConfig("hf", ""), module=tiny_model(seed=9))
        sync = WeightSync(engine)
        shard = dict(actor.named_parameters())["model.model.norm.weight"].detach().to_local()
        kept = shard.clone()
        if strategy.get_rank() == strategy.world_size - 1:
            shard[-1] = math.inf
        said = message(lambda: sync.sync(strategy.parameter_source(actor)))
        versions = [engine.weights_version]
        shard.copy_(kept)
        sync.sync(strategy.parameter_source(actor))
        return said, [*versions, engine.weights_version]


def program(rank, world_size, names, folder):
    start_process_group(timedelta(seconds=200))
    return sync_spoilt(), {name: spoil_and_save(name, f"{folder}/{name}") for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("finite")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of two ranks has said in every case."""
    has_deepspeed = find_spec("deepspeed") is not None
    names = [name for name in CASES[1:] if has_deepspeed or name.startswith("fsdp2")]
    return run_multiprocess(program, 2, timeout_seconds=200, args=(names, str(folder)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deepspeed] if name.startswith("zero") else [])
        for name in CASES
    ],
)
def test_all_ranks_end_and_nothing_is_written(folder, ranks, name):
    if name == "fake":
        said = spoil_and_save(name, folder / name)
    else:
        said, other = (cases[name] for _, cases in ranks)
        assert said == other
    assert sorted(p.name for p in (folder / name / "checkpoints").iterdir()) == ["good", "latest"]
    assert not (folder / name / "model").exists()
    for what, text in said.items():
        assert text is not None, what
        assert "not finite" in text
        assert "\n" not in text
    assert "1.weight" in said["weights"]
    assert "exp_avg" in said["optimizer"]


def test_no_rank_sends_a_weight_that_is_not_finite(ranks):
    said = ("weights are not finite: model.norm.weight", [-1, 0])
    assert [synced for synced, _ in ranks] == [said] * 2
