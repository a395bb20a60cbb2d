"""Proof on a user's model that a training step does not depend on how it is run."""
