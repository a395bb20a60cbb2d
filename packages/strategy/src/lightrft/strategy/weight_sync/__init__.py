"""Sending the trainer's weights to a rollout engine, and proving that they arrived."""
