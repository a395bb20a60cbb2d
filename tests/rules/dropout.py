"""Dropout is off while a model scores and while it is updated, or both have one mask."""

from __future__ import annotations

from tests.rules.stages import cells

CELLS = cells({})
