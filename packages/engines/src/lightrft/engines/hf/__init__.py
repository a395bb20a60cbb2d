"""Embedded engine: a decode loop over the transformers forward, in the trainer's process."""
