"""The loop of a run and what surrounds it."""
