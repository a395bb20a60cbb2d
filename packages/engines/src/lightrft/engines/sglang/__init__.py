"""SGLang rollout engine: one scheduler process beside each trainer process."""
