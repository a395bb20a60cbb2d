"""Ids beyond the embedding or the tokenizer are neither sampled nor trained."""

from __future__ import annotations

from tests.rules.stages import cells

CELLS = cells({})
