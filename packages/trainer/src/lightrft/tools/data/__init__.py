"""Checks of prompts and rewards before a run."""
