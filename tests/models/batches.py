"""Right-padded rows of unequal lengths, and gradients of what a model makes of them."""

import pytest
import torch
from tests.models.tiny import tiny_model

plain_and_fused = pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
LENGTHS = (19, 5, 33, 1, 12)


def make_batch(lengths=LENGTHS):
    """Return token ids, attention mask, scored mask and weights of the results, each [rows, width].

    Scored are the last two thirds of each row.
    """
    generator = torch.Generator().manual_seed(0)
    column = torch.tensor(lengths)[:, None]
    shape = len(lengths), max(lengths)
    token_ids = torch.randint(0, 256, shape, generator=generator)
    places = torch.arange(shape[1])
    attention_mask = places < column
    scored_mask = attention_mask & (places >= 1 + column // 3)
    return token_ids, attention_mask, scored_mask, torch.randn(shape, generator=generator)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def copies(module):
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def perturb(module, seed, size=0.02):
    """Add noise to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def draw_second_factors(actor, seed=5, size=0.2):
    """Let adapters have an effect: B is 0 at first."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def merged_reference(actor, base, scale):
    """Base + scale * B A in float64."""
    values = {n: p.detach().double() for n, p in actor.model.named_parameters()}
    merged = {n: p.detach().double() for n, p in base.named_parameters()}
    for name in merged:
        factors = [f"{name.removesuffix('.weight')}.lora_{e}.default.weight" for e in "BA"]
        if factors[0] in values:
            merged[name] += scale * values[factors[0]] @ values[factors[1]]
    return merged


def relative_norm(found, expected):
    """Return the norm of the difference of two sets of tensors by that of the expected ones."""
    difference = sum(float((found[n] - expected[n]).double().square().sum()) for n in expected)
    return (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5


def sliding_model():
    return tiny_model("mistral", vocab_size=256, sliding_window=7)


def forget_window(model):
    """Let a model that slides see whole rows."""
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
