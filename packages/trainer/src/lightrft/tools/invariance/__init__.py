"""Proof on a given model that a training step does not depend on how it is carried out."""
