"""vLLM in the trainer's own process behind `RolloutEngine`."""
