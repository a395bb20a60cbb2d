"""Names of vision-language models in vLLM's layout, on modules of its names and without vLLM."""

import re

import pytest
import torch
from tests.models.vision.tiny_world import tiny
from torch import nn

from lightrft.engines.model_shape import ModelShape, model_shape
from lightrft.engines.vllm.layout import LayoutReader
from lightrft.engines.vllm.media import may_lack

# Where vLLM has what lies at the beginning of transformers' names.
HOMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
)
PRESETS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-internvl", "tiny-gemma3", "tiny-llava")


class Mapper:
    """Maps a checkpoint's names as vLLM does."""

    def __init__(self, homes=HOMES):
        self.homes = homes

    def map_name(self, name):
        return next(
            (new + name.removeprefix(o) for o, new in self.homes if name.startswith(o)), name
        )


def vllm_like(preset, homes=HOMES):
    """A model with vLLM's names, and the checkpoint's shapes.

    In float64, of which nothing is read back: whether it can be is asked of vLLM.
    """
    model, _ = tiny(preset)
    shape = model_shape(model.config)
    root = nn.Module()
    for name, size in shape.shapes.items():
        if name in shape.tied:
            continue
        *path, attribute = Mapper().map_name(name).split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(attribute, nn.Parameter(torch.zeros(size, dtype=torch.float64)))
    root.hf_to_vllm_mapper = Mapper(homes)
    return root, shape, may_lack(model.config.model_type)


def layout_of(root, shape, lacking=""):
    return LayoutReader(
        root, shape, tp_rank=0, tp_size=1, default_dtype=torch.float32, may_lack=lacking
    ).read()


def without(shape, beginning):
    kept = {name: size for name, size in shape.shapes.items() if not name.startswith(beginning)}
    assert len(kept) < len(shape.shapes)
    return ModelShape(kept, shape.tied)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_of_the_checkpoint_is_in_the_manifest(preset):
    root, shape, lacking = vllm_like(preset)
    layout = layout_of(root, shape, lacking)
    assert [parameter.name for parameter in layout.manifest] == list(shape.shapes)
    filled = {layout.modules[name] for name in shape.shapes if name not in shape.tied}
    assert filled == {
        name
        for name, module in root.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_module_that_no_parameter_fills_is_named(preset):
    root, shape, lacking = vllm_like(preset)
    parts = {name.split(".")[1] for name in shape.shapes if name.startswith("model.")}
    for part in sorted(parts - {"language_model"}):
        match = rf"no checkpoint parameter is loaded into \d+ modules.*first: {part}\."
        with pytest.raises(ValueError, match=match):
            layout_of(root, without(shape, f"model.{part}."), lacking)
    inner = next(name for name in shape.shapes if re.search(r"(merger|projector).*\.weight", name))
    module = inner.removeprefix("model.").rpartition(".")[0]
    match = rf"into 1 modules of vLLM's model \(first: {re.escape(module)}\."
    with pytest.raises(ValueError, match=match):
        layout_of(root, without(shape, inner.rpartition(".")[0] + "."), lacking)
