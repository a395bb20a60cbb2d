"""Distillation on rows of a data set."""
