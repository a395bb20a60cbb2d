"""Checks of this machine."""
