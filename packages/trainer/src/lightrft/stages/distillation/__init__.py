"""Distillation on given rows."""
