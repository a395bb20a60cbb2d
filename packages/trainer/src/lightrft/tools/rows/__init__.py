"""Rows for supervised stages, of the recorded samples of a run."""
