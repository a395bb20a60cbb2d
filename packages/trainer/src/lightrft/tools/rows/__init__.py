"""Rows for supervised stages, made from the recorded samples of a run."""
