"""Responses end at every end that the model declares."""

from __future__ import annotations

from tests.rules.stages import cells

CELLS = cells({})
