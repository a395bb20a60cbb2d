"""Stages of training, and the parts that they share."""
