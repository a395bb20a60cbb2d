"""Tiny models of every family survive being written and loaded."""

import pytest
import torch
from tests.models.vision.tiny_families import TINY_FAMILIES, build_tiny, write_tiny_vision_model

from lightrft.models.loading import load_causal_lm, load_processor, load_trunk


@pytest.mark.parametrize("preset", TINY_FAMILIES)
def test_a_vision_model_loads_with_its_processor(tmp_path, preset):
    write_tiny_vision_model(tmp_path / "a", preset, seed=3)
    built, processor = build_tiny(preset, seed=3)
    loaded = load_causal_lm(str(tmp_path / "a"))
    expected = built.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert type(load_processor(str(tmp_path / "a"))) is type(processor)
    assert load_trunk(str(tmp_path / "a")).num_parameters() > 0
    other, _ = build_tiny(preset, seed=4)
    name = "lm_head.weight"
    assert not torch.equal(other.state_dict()[name], expected[name])
