"""Stages whose rows are known before the run: one way to draw, score and update."""
