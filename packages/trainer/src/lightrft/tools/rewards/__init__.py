"""Reward kinds that need sandboxes, workers or services."""
