"""Ways to plant a fault: each gives a function that plants it with a `MonkeyPatch`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from lightrft.stages.policy import policy_stage
from lightrft.strategy import backend


def calls(owner, name, change):
    """Call `change(original, *args, **kwargs)` in place of owner.name."""

    def plant(patch):
        original = getattr(owner, name)

        @functools.wraps(original)
        def changed(*args, **kwargs):
            return change(original, *args, **kwargs)

        patch.setattr(owner, name, changed)

    return plant


def results(owner, name, change):
    """Return `change(result)` from owner.name."""
    return calls(owner, name, lambda original, *args, **kwargs: change(original(*args, **kwargs)))


def fields(owner, name, **changes):
    """Change fields of what owner.name returns: each by a function of the result, or a value."""

    def change(result):
        values = {
            field: value(result) if callable(value) else value for field, value in changes.items()
        }
        return replace(result, **values)

    return results(owner, name, change)


def keywords(owner, name, **values):
    """Call owner.name with other keywords: functions of those that are passed, or values."""

    def change(original, *args, **kwargs):
        others = {n: v(kwargs[n]) if callable(v) else v for n, v in values.items()}
        return original(*args, **{**kwargs, **others})

    return calls(owner, name, change)


def instead(owner, name, value):
    """Put a value in the place of owner.name."""
    return lambda patch: patch.setattr(owner, name, value)


def before_each_step(change):
    """Do something to the main model before the states of each step are recorded."""

    def observer(original, self, *args):
        with torch.no_grad():
            change(self.models.main)
        return original(self, *args)

    return calls(policy_stage.PolicyStage, "observe_step", observer)


def scaled(part, factor):
    """Multiply the parameters that have this in their names, for `before_each_step`."""

    def change(main):
        for name, value in main.model.named_parameters():
            if part in name:
                value.mul_(factor)

    return change


def trained_without(part):
    """Leave parameters that have this in their names out of optimizers."""
    return calls(
        backend,
        "parameter_groups",
        lambda original, named, decay: original([(n, p) for n, p in named if part not in n], decay),
    )
