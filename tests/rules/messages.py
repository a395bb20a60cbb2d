"""Rules of messages: what a row says in them is read by every stage, or refused by it."""

from __future__ import annotations

from tests.rules.stages import cells

NULLS = cells({})
ARGUMENTS = cells({})
BARE_CALLS = cells({})
PARTS = cells({})
BEGUN_ANSWERS = cells({})
UNREAD = cells({})
UNTRAINED = cells({})
NOT_A_NUMBER = cells({})
