"""Environments of other makes."""
