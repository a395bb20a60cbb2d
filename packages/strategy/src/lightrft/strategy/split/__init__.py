"""Ranks that train and ranks that only generate in one launch: how the two sides meet."""
