"""Replay of a recorded step."""
