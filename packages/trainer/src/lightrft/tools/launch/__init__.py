"""Start of a run on several nodes."""
