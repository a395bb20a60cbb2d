"""Finds the first layer in which two copies of one model compute different things."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightrft.strategy.weight_sync.parameter_source import checkpoint_module


def first_divergence(
    trainer: nn.Module,
    actor: nn.Module,
    engine: object,
    token_ids: Sequence[int],
    *,
    device: torch.device,
    limit: float,
) -> str | None:
    """Runs one sequence through the trainer's model and the engine's, and compares all layers.

    Collective where the trainer's model is sharded: every rank must call it.

    Args:
        trainer: The actor itself; its modules are watched.
        actor: The same as the strategy wrapped it; it is called.
        engine: The engine's own model, if it is a torch module.
        token_ids: The sequence.
        device: Where the actor computes.
        limit: Allowed ||a - b|| / ||b|| of a layer's output.

    Returns:
        One line about the first layer that differs, "" if none does; None if the engine is no
        torch module, so that it cannot be watched.
    """
    tokens = torch.tensor([list(token_ids)], device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    expected = _outputs(checkpoint_module(trainer), lambda: actor(tokens, mask))
    if not isinstance(engine, nn.Module):
        return None
    first = next(engine.parameters())
    there = tokens.to(first.device)
    found = _outputs(
        engine,
        lambda: engine(input_ids=there, attention_mask=torch.ones_like(there), use_cache=False),
    )
    for name in [name for name in found if name in expected]:
        distance = _distance(found[name], expected[name])
        # Written so that NaN counts as a difference.
        if distance is not None and not distance <= limit:
            return (
                f"outputs differ first in {name} (||engine - trainer|| / ||trainer|| = "
                f"{distance:.2e}, expected at most {limit:g})"
            )
    return ""


def _distance(found: Tensor, expected: Tensor) -> float | None:
    """||found - expected|| / ||expected||; None if their sizes differ (other layouts of a row)."""
    if found.numel() != expected.numel():
        return None
    right = expected.double().flatten().cpu()
    left = found.double().flatten().cpu()
    return float((left - right).norm() / right.norm().clamp(min=1e-30))


@torch.no_grad()
def _outputs(model: nn.Module, call: Callable[[], object]) -> dict[str, Tensor]:
    """Module name -> its output during a call, in the order in which modules finished."""
    outputs: dict[str, Tensor] = {}
    modes = [(module, module.training) for module in model.modules()]

    def watcher(name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            del module, inputs
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Tensor) and value.is_floating_point():
                outputs.setdefault(name, value.detach())

        return keep

    handles = [
        module.register_forward_hook(watcher(name)) for name, module in model.named_modules()
    ]
    model.eval()
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return outputs
