"""Reinforcement: rollouts, experience, and updates of a policy."""
