"""Memory of a run, predicted from its options; plain arithmetic, without torch."""
