"""Sources of rollouts and their rewards."""
