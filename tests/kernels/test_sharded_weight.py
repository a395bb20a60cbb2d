"""linear_logprob of DTensors: vocabulary split over ranks, or the weight fully sharded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightrft.kernels import VocabShard, linear_logprob
from lightrft.strategy.testing import run_multiprocess


def make_inputs(num_tokens=22, vocab=103, size=16):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, size, generator=generator)
    weight = torch.randn(vocab, size, generator=generator) * (3 / math.sqrt(size))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets, torch.randn(2, num_tokens, generator=generator)


def value_and_gradients(leaves, targets, upstream, entropy="grad", **options):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = linear_logprob(
        leaves[0], leaves[1], targets, bias=leaves[2], temperature=0.8, entropy=entropy, **options
    )
    loss = (output.logprobs * upstream[0]).sum()
    if entropy == "grad":
        loss = loss + (output.entropy * upstream[1]).sum()
    return output, torch.autograd.grad(loss, leaves)


def check(rank, world, placements, entropy):
    from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    hidden, weight, bias, targets, upstream = make_inputs()
    expected, gradients = value_and_gradients((hidden, weight, bias), targets, upstream, entropy)
    rows, columns = placements
    leaves = [
        distribute_tensor(tensor, mesh, [placement])
        for tensor, placement in ((hidden, rows), (weight, columns), (bias, columns))
    ]
    output, got = value_and_gradients(
        leaves,
        distribute_tensor(targets, mesh, [rows]),
        [distribute_tensor(u, mesh, [rows]) for u in upstream],
        entropy,
    )
    assert isinstance(output.logprobs, DTensor)
    assert output.logprobs.placements == (rows,)
    assert (output.logprobs.full_tensor() - expected.logprobs).abs().max() < 1e-5
    if entropy == "grad":
        assert (output.entropy.full_tensor() - expected.entropy).abs().max() < 1e-5
    for value, reference, leaf in zip(got, gradients, leaves, strict=True):
        assert value.placements == leaf.placements, (value.shape, value.placements, placements)
        assert (value.full_tensor() - reference).norm() < 3e-6 * reference.norm()
    # Positive control: a rank that holds the rows of the other one is noticed.
    swapped = DTensor.from_local(
        weight[: leaves[1].to_local().shape[0]] if rank else leaves[1].to_local(),
        mesh,
        [columns],
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    wrong, _ = value_and_gradients(
        (leaves[0], swapped, leaves[2]),
        distribute_tensor(targets, mesh, [rows]),
        [distribute_tensor(u, mesh, [rows]) for u in upstream],
        entropy,
    )
    assert (wrong.logprobs.full_tensor() - expected.logprobs).abs().max() > 1e-2
    return mesh, leaves


def compare(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    # The vocabulary split over ranks that hold the same tokens; the weight fully sharded over
    # ranks that hold different ones.
    for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(0))):
        for entropy in ("grad", "none"):
            mesh, leaves = check(rank, world, placements, entropy)
    hidden, _, _, targets, _ = make_inputs()
    sharded_targets = distribute_tensor(targets, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="expected DTensors only, or none: got plain hidden"):
        linear_logprob(hidden, leaves[1], sharded_targets)
    with pytest.raises(ValueError, match=r"tp and workspace\.grad_weight are for plain tensors"):
        linear_logprob(leaves[0], leaves[1], sharded_targets, tp=VocabShard(None, 0, 103))
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_two_ranks_equal_one():
    run_multiprocess(compare, 2)
