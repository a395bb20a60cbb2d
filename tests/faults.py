"""Ways to plant a fault; each returns what plants it, a function of pytest's monkeypatch."""

from __future__ import annotations

import functools
from dataclasses import replace


def wrap(patch, owner, name, change):
    """Replace owner.name by change(original)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(original)(change(original)))


def calls(owner, name, change):
    """Call `change(original, *args, **kwargs)` in place of owner.name."""
    return lambda patch: wrap(
        patch, owner, name, lambda original: lambda *a, **k: change(original, *a, **k)
    )


def becomes(owner, name, value):
    """Set owner.name."""
    return lambda patch: patch.setattr(owner, name, value)


def results(owner, name, change):
    """Change what owner.name returns."""
    return calls(owner, name, lambda original, *a, **k: change(original(*a, **k)))


def takes(owner, name, **changes):
    """Call owner.name with other keyword arguments."""
    return calls(owner, name, lambda original, *a, **k: original(*a, **{**k, **changes}))


def fields(**changes):
    """Return what changes fields of a dataclass, each by a function."""
    return lambda item: replace(item, **{n: f(getattr(item, n)) for n, f in changes.items()})


def configured(config, options):
    """Return a configuration with other options, which are not checked."""
    changed = config.__class__.__new__(config.__class__)
    changed.__dict__.update({**config.__dict__, **options})
    return changed
