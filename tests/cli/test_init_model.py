"""`lightrft init-model` writes checkpoints that load."""

from __future__ import annotations

import pytest
import torch

from lightrft.cli.init_model import PRESETS
from lightrft.cli.main import main


@pytest.mark.parametrize("preset", PRESETS)
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


def test_presets_are_those_of_the_models_package():
    from lightrft.models.presets import PRESETS as KNOWN

    assert set(PRESETS) == set(KNOWN)
