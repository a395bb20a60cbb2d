"""Planted faults are found in every type that trains, also in those that no test names."""

import re

import pytest
import torch
from tests.engines.altered_engines import embedded, no_convolution
from tests.engines.plain_forward import largest_error, prompts
from tests.models.all_types import types
from tests.stages.test_proof_at_load import forget_transform, show_padding
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from lightrft.config import ConfigError, TrainConfig
from lightrft.engines import SamplingParams
from lightrft.engines.hf.forward import CacheRefusedError
from lightrft.models import Actor, actor as actor_module
from lightrft.models.head import HeadTransform
from lightrft.models.loading import ModelLoadError
from lightrft.models.lora import LoraActor
from lightrft.models.proof import pack_rows, prove_model
from lightrft.models.sequence_model import trunk_output
from lightrft.models.types import LayoutRefusedError
from lightrft.stages.models import turn_off_dropout
from lightrft.strategy import get_fake_strategy

pytest.importorskip("peft", reason="package peft is not installed")
CONTEXT = get_fake_strategy({}).context
OUTCOMES = types.outcomes_of_page("text train on rows of text")
ACCEPTED = [name for name in types.TEXT if OUTCOMES[name] in (types.PACKED, types.PADDED)]


def proved(model):
    actor = Actor(model) if isinstance(model, torch.nn.Module) else model()
    turn_off_dropout(actor, keeps_adapters=False)
    return prove_model(actor, CONTEXT, is_random=False)


def leak(monkeypatch):
    """Tokens of a stream see a hundredth of the one before, whichever row it is of."""

    def leaking(trunk, layout, *args, **options):
        output = trunk_output(trunk, layout, *args, **options)
        if layout.bounds is not None:
            hidden = output.last_hidden_state
            output.last_hidden_state = hidden + 0.01 * hidden.roll(1, 1)
        return output

    monkeypatch.setattr(actor_module, "trunk_output", leaking)


def with_dead_adapters(model):
    """Return a model with adapters; those of its first kind of layer have no effect."""
    actor = LoraActor(model, TrainConfig(lora_rank=2))
    modules = actor.language_model.named_modules()
    layers = [(n, m) for n, m in modules if type(getattr(m, "base_layer", None)) is torch.nn.Linear]
    kind = re.sub(r"\d+", "*", layers[0][0]) if layers else ""
    for name, layer in layers:
        if re.sub(r"\d+", "*", name) == kind:
            layer.forward = layer.base_layer.forward
    return actor


def untied(model):
    for name in model.all_tied_weights_keys:
        module, _, weight = name.rpartition(".")
        value = model.get_parameter(name).detach().clone()
        setattr(model.get_submodule(module), weight, torch.nn.Parameter(value))


def refused(fault, name, monkeypatch):
    """Return whether a fault can be planted; raise what refuses it."""
    model = types.tiny_model(name)
    if fault == "scale":
        has_scale = actor_module.read_head_transform(model) != HeadTransform()
        forget_transform(monkeypatch)
        return has_scale and proved(model)
    if fault == "leak":
        leak(monkeypatch)
        return OUTCOMES[name] == types.PACKED and pack_rows(proved(model))
    if fault == "padding":
        show_padding(monkeypatch)
        # Experts that are as good as others change by rounding, which hides faults.
        return proved(model).unit < 0.01
    if fault == "tie":
        is_tied = bool(model.all_tied_weights_keys)
        actor = Actor(model)
        untied(model)
        return is_tied and proved(lambda: actor)
    if fault == "adapter":
        try:
            proved(lambda: LoraActor(model, TrainConfig(lora_rank=2)))
        except (ConfigError, ModelLoadError) as error:
            if re.search(NO_ADAPTERS, str(error)):
                return False
            raise AssertionError(name) from error
        actor = with_dead_adapters(types.tiny_model(name))
        return proved(lambda: actor) and any("forward" in vars(m) for m in actor.modules())
    layers = DynamicCache(config=model.config).layers
    if not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return False
    no_convolution(monkeypatch)
    params = SamplingParams(max_tokens=3)
    # Some convolutions compute nothing before they are trained.
    return largest_error(model, embedded(model.eval()).generate(prompts(4), params)) > 1e-3


NO_ADAPTERS = "no linear layer|weights there without calling|has a parameter for each"
REFUSALS = {
    "scale": (ModelLoadError, "other log-probabilities than|around its output"),
    "leak": (LayoutRefusedError, "mixes packed sequences"),
    "padding": (ModelLoadError, "padded rows are not computed"),
    "tie": (ModelLoadError, "has a parameter for each"),
    "adapter": (ConfigError, "adapters on .* have no effect"),
    "cache": (CacheRefusedError, "gives other log-probabilities"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", REFUSALS)
def test_a_fault_is_refused_in_every_type_where_it_can_be_planted(fault):
    kind, words = REFUSALS[fault]
    passed, others, num_refused = [], [], 0
    for name in ACCEPTED:
        with pytest.MonkeyPatch.context() as patch:
            try:
                if refused(fault, name, patch):
                    passed.append(name)
            except kind as error:
                num_refused += 1
                others += [] if re.search(words, str(error)) else [(name, error)]
    assert not passed
    assert not others
    assert num_refused > 10
