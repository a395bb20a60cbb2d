"""Rows of fused checkpoint tensors in vLLM's own layers on two ranks: hashes add up."""

from types import SimpleNamespace

import pytest
import torch
from tests.ranks import run_multiprocess
from torch import nn

from lightrft.engines.model_shape import ModelShape

pytestmark = pytest.mark.vllm
HIDDEN = 6
# vLLM's name of a layer, its rows in the checkpoint.
ROWS = {"qkv": 24, "grouped": 16, "shared_heads": 12, "gate_up": 20, "plain": 8, "whole": 24}


def numbered(name, *, is_bias):
    """The checkpoint's tensor, each element another number."""
    shape = (ROWS[name],) if is_bias else (ROWS[name], HIDDEN)
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


def layers():
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
    )

    root = nn.Module()
    root.qkv = QKVParallelLinear(HIDDEN, 2, 4)
    root.grouped = QKVParallelLinear(HIDDEN, 2, 4, 2)
    # One head of keys for both ranks, which each of them holds.
    root.shared_heads = QKVParallelLinear(HIDDEN, 2, 4, 1)
    root.gate_up = MergedColumnParallelLinear(HIDDEN, [8, 12])
    root.plain = ColumnParallelLinear(HIDDEN, 8)
    root.whole = QKVParallelLinear(HIDDEN, 2, 4, disable_tp=True)
    return root


def rows_of_rank(rank, world_size):
    import torch.distributed as dist
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from lightrft.engines.vllm.layout import LayoutReader
    from lightrft.engines.vllm.weights import VLLMWeights
    from lightrft.kernels import hash_tensor

    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world_size, rank, "env://", rank, "gloo")
        initialize_model_parallel(world_size)
        root = layers()
    shapes = {}
    for name, layer in root.named_children():
        for attribute, parameter in layer.named_parameters():
            full = numbered(name, is_bias=attribute == "bias")
            shapes[f"{name}.{attribute}"] = tuple(full.shape)
            parameter.weight_loader(parameter, full)
    read = LayoutReader(
        root, ModelShape(shapes, {}), tp_rank=rank, tp_size=world_size, default_dtype=torch.float32
    ).read()
    weights = VLLMWeights(SimpleNamespace(model=root), read, "vllm")
    found = weights.hashes([name for name in shapes if name in read.places])
    wanted = {
        name: hash_tensor(numbered(name.split(".")[0], is_bias=name.endswith("bias")))
        for name in shapes
    }
    # A rank with one wrong element is found.
    if rank == 1:
        root.qkv.weight.data[5, 1] += 1
    spoilt = weights.hashes(["qkv.weight"])["qkv.weight"]
    return {
        **{name: (found.get(name), wanted[name]) for name in shapes},
        "spoilt": (spoilt, wanted["qkv.weight"]),
    }


def test_hashes_of_fused_tensors_are_those_of_the_trainer():
    for found in run_multiprocess(rows_of_rank, 2, timeout_seconds=120):
        spoilt, good = found.pop("spoilt")
        assert spoilt != good
        for name, (engine, trainer) in found.items():
            if name.startswith("shared_heads"):
                assert engine is None, name  # not read back, and said so in the manifest
            else:
                assert engine == trainer, name


def test_what_a_loader_of_its_own_deals_out_is_not_read_back(monkeypatch):
    from lightrft.engines.vllm import layout

    monkeypatch.setattr(layout, "vocabulary_rows", lambda module: None)
    root = nn.Module()
    root.inner = nn.Linear(HIDDEN, 4, bias=False)
    shapes = {"inner.weight": (8, HIDDEN)}

    def places():
        return layout.LayoutReader(
            root, ModelShape(shapes, {}), tp_rank=1, tp_size=2, default_dtype=torch.float32
        ).read()

    (place,) = places().places["inner.weight"]
    assert (place.global_start, place.num_rows) == (4, 4)
    root.inner.weight.weight_loader = SimpleNamespace(__self__=None)
    assert not places().places
    assert not places().manifest[0].verifiable
