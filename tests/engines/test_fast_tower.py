"""Towers that compute patches and parts in few calls give what transformers' own give."""

import copy
from itertools import pairwise

import pytest
import torch
from tests.models.vision.tiny_families import build_tiny, write_tiny_vision_model
from torch import nn

from lightrft.engines.hf.engine import build_model
from lightrft.engines.hf.tower import IN_PARTS, PatchConv3d, attention_of_parts, use_fast_tower
from lightrft.engines.types import EngineConfig
from lightrft.models import load_causal_lm

FAST = (
    "tiny-qwen2-vl",
    "tiny-qwen2.5-vl",
    "tiny-qwen3-vl",
    "tiny-qwen3-vl-moe",
    "tiny-qwen3.5",
    "tiny-glm4v",
)
# Time, height and width of pictures of one size and of several, windows cut and whole, and a film.
GRIDS = {
    "equal": [[1, 4, 4], [1, 4, 4], [1, 4, 4]],
    "several": [[1, 4, 4], [1, 8, 6], [1, 4, 2], [1, 4, 4]],
    "film": [[1, 4, 4], [3, 4, 2]],
}


# GLM-4V is trained with images alone.
CASES = [(f, kind) for f in FAST for kind in GRIDS if (f, kind) != ("tiny-glm4v", "film")]


@pytest.fixture(scope="module", params=FAST)
def towers(request):
    """A tower in float64, and a copy of it that is fast."""
    model, _ = build_tiny(request.param)
    model.double().train()
    fast = copy.deepcopy(model)
    use_fast_tower(fast)
    return model.model.visual, fast.model.visual


def results(tower, grids):
    """Features, and gradients of a sum of them by parameter."""
    grid, random = torch.tensor(grids), torch.Generator().manual_seed(0)
    weight = tower.patch_embed.proj.weight
    pixels = torch.randn(
        int(grid.prod(1).sum()), weight[0].numel(), dtype=torch.float64, generator=random
    )
    tower.zero_grad()
    found = tower(pixels, grid_thw=grid).pooler_output
    (found * torch.randn(found.shape, dtype=torch.float64, generator=random)).sum().backward()
    return found, {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("towers, kind", CASES, indirect=["towers"])
def test_features_and_gradients_are_those_of_transformers(towers, kind):
    grids = GRIDS[kind]
    (expected, gradients), (found, others) = (results(tower, grids) for tower in towers)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_the_fast_tower_is_the_one_that_runs(towers):
    plain, fast = towers
    assert type(plain.patch_embed.proj) is nn.Conv3d
    assert type(fast.patch_embed.proj) is PatchConv3d
    for tower, expected in ((plain, "sdpa"), (fast, IN_PARTS)):
        assert {block.attn.config._attn_implementation for block in tower.blocks} == {expected}
        assert tower.config._attn_implementation == "sdpa"


def test_a_planted_other_cut_of_the_stream_is_seen(towers):
    _, fast = towers
    one = results(fast, [[1, 4, 4], [1, 4, 4]])[0]
    other = results(fast, [[1, 8, 4]])[0]
    assert (one - other).abs().max() > 1e-3


def test_parts_in_any_order_of_lengths_come_back_in_place():
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 4, generator=random).double()
    bounds = torch.tensor([0, 3, 4, 7, 9, 12])
    found, _ = attention_of_parts(nn.Module(), q, k, v, None, cu_seq_lens_q=bounds, scaling=0.3)
    for start, stop in pairwise(bounds):
        own = slice(start, stop)
        scores = (q[0, :, own] @ k[0, :, own].transpose(1, 2) * 0.3).softmax(-1)
        expected = (scores @ v[0, :, own]).transpose(0, 1)
        torch.testing.assert_close(found[0, own], expected)


def test_a_convolution_over_more_than_a_patch_stays_one():
    plain = nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4))
    other = copy.deepcopy(plain)
    other.__class__ = PatchConv3d
    for shape in ((2, 3, 2, 4, 4), (2, 3, 4, 8, 4), (3, 2, 8, 8)):
        pixels = torch.randn(shape)
        torch.testing.assert_close(other(pixels), plain(pixels))


@pytest.mark.full
def test_trainer_and_engine_load_fast_towers(tmp_path):
    write_tiny_vision_model(tmp_path, "tiny-qwen2.5-vl")
    trained = load_causal_lm(str(tmp_path))
    loaded, _ = build_model(EngineConfig("hf", str(tmp_path)), None)
    rebuilt, _ = build_model(EngineConfig("hf", ""), trained)
    for model in (trained, loaded, rebuilt):
        assert type(model.model.visual.patch_embed.proj) is PatchConv3d
        assert model.model.visual.blocks[0].attn.config._attn_implementation == IN_PARTS


def test_other_towers_stay_as_they_are():
    model, _ = build_tiny("tiny-llava")
    use_fast_tower(model)
    assert not any(isinstance(module, PatchConv3d) for module in model.modules())
    assert model.config.vision_config._attn_implementation == "sdpa"
