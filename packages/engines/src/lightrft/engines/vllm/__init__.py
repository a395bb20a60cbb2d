"""vLLM in the trainer's process, as a `RolloutEngine`."""
