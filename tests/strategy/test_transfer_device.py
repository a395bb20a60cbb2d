"""Tensors travel on the wire of their group's backend, whatever name torch gives a compound one."""

import os

import pytest
import torch
import torch.distributed as dist

from lightrft.strategy.distributed.collectives import ALONE, gather_objects, transfer_device


@pytest.fixture
def start_group(monkeypatch):
    """Starts a group of one rank; "fake" stands for NCCL, which needs a GPU to start."""
    import torch.testing._internal.distributed.fake_pg  # registers "fake"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def start(backend):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend, device",
    [("cpu:gloo,cuda:fake", "cuda:3"), ("cpu:gloo,cuda:gloo", "cpu"), ("gloo", "cpu")],
)
def test_weights_travel_on_gpus_where_the_group_has_a_backend_for_them(
    start_group, backend, device
):
    start_group(backend)
    assert transfer_device(None) == torch.device(device)
    assert gather_objects("stays on the host") == ["stays on the host"]


@pytest.mark.parametrize(
    "config, device", [("cpu:gloo,cuda:nccl", "cuda:3"), ("cuda:nccl", "cuda:3")]
)
def test_nccl_is_recognised_alone_and_in_a_compound(start_group, monkeypatch, config, device):
    start_group("gloo")
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert transfer_device(dist.group.WORLD) == torch.device(device)


def test_a_single_process_has_no_wire():
    assert transfer_device(ALONE) == torch.device("cpu")


def test_vllm_is_told_the_device_of_the_process_not_its_rank_in_the_world(start_group, monkeypatch):
    # Private: its public caller needs vLLM.
    from lightrft.engines.vllm.backend import rank_variables

    start_group("gloo")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with rank_variables():
        assert os.environ["LOCAL_RANK"] == "0"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with rank_variables():
        assert os.environ["LOCAL_RANK"] == "3"
    assert "LOCAL_RANK" not in os.environ
