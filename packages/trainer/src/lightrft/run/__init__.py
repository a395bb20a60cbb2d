"""The loop of a run and its surroundings."""
