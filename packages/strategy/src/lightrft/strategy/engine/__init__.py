"""The rollout engine beside the trainer."""
