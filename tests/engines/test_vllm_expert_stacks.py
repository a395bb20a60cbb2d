"""Places of experts in vLLM's stacks, on modules of its names and shapes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightrft.engines.model_shape import ModelShape
from lightrft.engines.vllm.experts import repack_on_cpu
from lightrft.engines.vllm.layout import LayoutReader
from lightrft.kernels import hash_tensor

EXPERTS, WIDTH, HIDDEN = 3, 5, 7
LAYER = "model.layers.0.mlp.experts"
FUSED = {
    f"{LAYER}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
    f"{LAYER}.down_proj": (EXPERTS, HIDDEN, WIDTH),
}
SPLIT = {
    f"{LAYER}.{expert}.{part}_proj.weight": shape
    for expert in range(EXPERTS)
    for part, shape in (
        ("gate", (WIDTH, HIDDEN)),
        ("up", (WIDTH, HIDDEN)),
        ("down", (HIDDEN, WIDTH)),
    )
}


def vllm_like(backend="TRITON", *, num_experts=EXPERTS):
    """A model with the stacks of one layer; each element another value."""
    model = nn.Module()
    stacks = nn.Module()
    stacks.w13_weight = nn.Parameter(
        torch.arange(float(num_experts * 2 * WIDTH * HIDDEN)).view(num_experts, -1, HIDDEN)
    )
    stacks.w2_weight = nn.Parameter(
        -torch.arange(float(num_experts * WIDTH * HIDDEN)).view(num_experts, HIDDEN, WIDTH)
    )
    stacks.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(value=backend))
    parent = model
    for name in (*LAYER.split("."), "routed_experts"):
        child = stacks if name == "routed_experts" else nn.Module()
        parent.add_module(name, child)
        parent = child
    return model, stacks


def layout_of(model, shapes, *, tp_size=1):
    return LayoutReader(
        model, ModelShape(shapes, {}), tp_rank=0, tp_size=tp_size, default_dtype=torch.float32
    ).read()


def expected_tensor(name, stacks):
    """Slow: what a checkpoint parameter holds, from the stacks."""
    part = name.removeprefix(f"{LAYER}.")
    if part in ("gate_up_proj", "down_proj"):
        return stacks.w13_weight if part == "gate_up_proj" else stacks.w2_weight
    expert, kind, _ = part.split(".")
    if kind == "down_proj":
        return stacks.w2_weight[int(expert)]
    gate, up = stacks.w13_weight[int(expert)].chunk(2)
    return gate if kind == "gate_proj" else up


@pytest.mark.parametrize("shapes", [FUSED, SPLIT], ids=["fused", "split"])
def test_every_expert_is_found_where_it_lies(shapes):
    model, stacks = vllm_like()
    layout = layout_of(model, shapes)
    assert [p.name for p in layout.manifest] == list(shapes)
    seen = {"w13_weight": [], "w2_weight": []}
    for parameter in layout.manifest:
        assert parameter.verifiable
        assert set(parameter.fused_with) == set(shapes) - {parameter.name}
        (place,) = layout.places[parameter.name]
        rows = getattr(stacks, place.attribute).flatten(0, place.num_row_dims - 1)
        found = rows[place.local_start : place.local_start + place.num_rows]
        expected = expected_tensor(parameter.name, stacks)
        assert hash_tensor(found) == hash_tensor(expected.contiguous())
        assert found.numel() == parameter.numel
        seen[place.attribute] += range(place.local_start, place.local_start + place.num_rows)
    # Every row of both stacks belongs to one parameter.
    assert sorted(seen["w13_weight"]) == list(range(EXPERTS * 2 * WIDTH))
    assert sorted(seen["w2_weight"]) == list(range(EXPERTS * HIDDEN))


@pytest.mark.parametrize("backend", ["CPU", "FlashInfer CUTLASS", "FlashInfer TRTLLM", ""])
def test_stacks_that_a_kernel_rearranges_are_not_read_back(backend):
    layout = layout_of(vllm_like(backend)[0], FUSED)
    assert not layout.places
    assert not any(parameter.verifiable for parameter in layout.manifest)


def test_a_share_of_the_experts_is_not_read_back():
    """Expert parallelism, or tensor parallelism within experts."""
    assert not layout_of(vllm_like(num_experts=EXPERTS - 1)[0], FUSED, tp_size=2).places
    halves = {name: (s[0], s[1] * 2, s[2]) for name, s in FUSED.items()}
    assert not layout_of(vllm_like()[0], halves, tp_size=2).places


def test_experts_that_the_model_lacks_are_named():
    with pytest.raises(ValueError, match=r"no tensor for 1 checkpoint parameters.*layers\.7"):
        layout_of(vllm_like()[0], FUSED | {"model.layers.7.mlp.experts.down_proj": (3, 7, 5)})


def test_what_was_reloaded_is_packed_once_and_nothing_else():
    packed = []
    modules = {name: vllm_like(backend)[1] for name, backend in (("a", "CPU"), ("b", "TRITON"))}
    modules["other"] = vllm_like("CPU")[1]
    for module in modules.values():
        experts = SimpleNamespace(process_weights_after_loading=packed.append)
        module.quant_method.moe_kernel = SimpleNamespace(fused_experts=experts)
    modules["plain"] = nn.Linear(2, 2)
    repack_on_cpu(modules, ["a", "b", "plain"])
    assert packed == [modules["a"]]
