"""Ways to plant a fault: each gives a function that plants it with a `MonkeyPatch`."""

from __future__ import annotations

import functools
from dataclasses import replace


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
