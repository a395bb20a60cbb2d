"""Records of a step: rollouts, tables of rows, batches."""
