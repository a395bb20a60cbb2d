"""Rules of texts: one beginning, no end behind a prompt, and a length that is known in time."""

from __future__ import annotations

from tests.rules.stages import cells

ONE_BEGINNING = cells({})
OPEN_PROMPTS = cells({})
LENGTHS = cells({})
