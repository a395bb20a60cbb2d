"""Checkpoint folders: writing, completing, finding, rotating and reading them."""
