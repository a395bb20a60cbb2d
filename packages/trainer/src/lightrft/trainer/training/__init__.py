"""One step of training: update, state, metrics, checks."""
