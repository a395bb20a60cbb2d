"""`lightrft init-model` writes checkpoints that load."""

from __future__ import annotations

import pytest
import torch

from lightrft.cli.main import main
from lightrft.tools.init_model_command import TEXT_PRESETS, VISION_PRESETS


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_the_model_loads_and_depends_on_the_seed_alone(tmp_path, capsys, preset):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        argv = ["init-model", str(tmp_path / name), "--preset", preset, "--seed", seed]
        assert main(argv) == 0
        assert preset in capsys.readouterr().out
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc"]
    first, twin, other = (
        torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in models
    )
    assert torch.equal(first, twin)
    assert not torch.equal(first, other)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").chat_template


def test_the_vision_model_is_that_of_its_seed_with_its_processor(tmp_path, capsys):
    from lightrft.models.loading import load_causal_lm, load_processor
    from lightrft.tools.tiny_vision_models import build_tiny

    (preset,) = VISION_PRESETS
    assert main(["init-model", str(tmp_path / "a"), "--preset", preset, "--seed", "3"]) == 0
    assert preset in capsys.readouterr().out
    built, processor = build_tiny(seed=3)
    loaded, expected = load_causal_lm(str(tmp_path / "a")).state_dict(), built.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    assert type(load_processor(str(tmp_path / "a"))) is type(processor)


def test_presets_are_those_that_can_be_written():
    from lightrft.tools.model_presets import PRESETS as KNOWN

    assert set(TEXT_PRESETS) == set(KNOWN)
