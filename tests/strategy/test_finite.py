"""Values that are not finite end every rank, by name, and nothing that holds them is written."""

from __future__ import annotations

import math
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.ranks import run_multiprocess
from torch import nn

from lightrft.strategy.distributed.collectives import nonfinite_names
from lightrft.strategy.distributed.process_end import NumericsError

BACKENDS = {
    "fake": {},
    "fsdp": {"fsdp": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}


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
    if backend == "fsdp":
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


def spoil_and_save(rank, world_size, backend, folder, in_background):
    """What every way out says of a value that only the last rank holds."""
    from pathlib import Path

    from lightrft.config import TrainConfig
    from lightrft.strategy import get_strategy

    config = {"async_save": in_background, "bf16": False, **BACKENDS[backend]}
    with get_strategy(TrainConfig(**config)) as strategy:
        strategy.setup_distributed(timeout=timedelta(seconds=200))
        torch.manual_seed(0)
        model = strategy.prepare_model(
            nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), is_training=True
        )
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        ready = strategy.prepare((model, optimizer, schedule))
        with strategy.accumulation(1, ready.optimizer):
            loss = ready.model(torch.ones(2, 4)).square().mean()
            strategy.backward(loss, ready.model, ready.optimizer)
            strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler)
        checkpoints = Path(folder) / "checkpoints"

        def save(tag):
            strategy.save_ckpt(ready, str(checkpoints), tag, 1)

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
        states = [state for state in optimizer.state.values() if state.get("exp_avg") is not None]
        if rank == world_size - 1:
            value = states[0]["exp_avg"]
            (value.to_local() if hasattr(value, "to_local") else value).view(-1)[0] = math.inf
        said["optimizer"] = message(lambda: save("bad"))
        strategy.finish_saving()
        return said


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("backend", "in_background"),
    [*((name, False) for name in BACKENDS), ("fsdp", True), ("zero2", True)],
)
def test_all_ranks_end_and_nothing_is_written(tmp_path, backend, in_background):
    if backend.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    world_size = 1 if backend == "fake" else 2
    arguments = (backend, str(tmp_path), in_background)
    found = run_multiprocess(spoil_and_save, world_size, timeout_seconds=120, args=arguments)
    assert found == [found[0]] * world_size
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["good", "latest"]
    assert not (tmp_path / "model").exists()
    for what, text in found[0].items():
        assert text is not None, what
        assert "not finite" in text
        assert "\n" not in text
    assert "1.weight" in found[0]["weights"]
    assert "exp_avg" in found[0]["optimizer"]


def sync_spoilt(rank, world_size):
    """What a sync says of a weight that only the last rank holds, and then of a sound one."""
    from lightrft.config import TrainConfig
    from lightrft.engines import EngineConfig
    from lightrft.engines.hf.engine import HFEngine
    from lightrft.models import Actor
    from lightrft.strategy import get_strategy
    from lightrft.strategy.weight_sync.sync import WeightSync

    with get_strategy(TrainConfig(fsdp=True, bf16=False)) as strategy:
        actor = strategy.prepare_model(Actor(tiny_model()), is_training=True)
        engine = HFEngine(EngineConfig(engine_type="hf", model_path=""), module=tiny_model(seed=9))
        sync = WeightSync(engine)
        shard = dict(actor.named_parameters())["model.model.norm.weight"].detach().to_local()
        kept = shard.clone()
        if rank == world_size - 1:
            shard[-1] = math.inf
        said = message(lambda: sync.sync(strategy.parameter_source(actor)))
        versions = [engine.weights_version]
        shard.copy_(kept)
        sync.sync(strategy.parameter_source(actor))
        return said, [*versions, engine.weights_version]


@pytest.mark.multiprocess
def test_no_rank_sends_a_weight_that_is_not_finite():
    found = run_multiprocess(sync_spoilt, 2, timeout_seconds=120)
    assert found == [("weights are not finite: model.norm.weight", [-1, 0])] * 2
