"""Reinforcement where the last ranks only generate (`--rollout_ranks`): the work of both sides."""
