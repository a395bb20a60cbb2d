"""Supervised fine-tuning as a stage: rows whose trained tokens are known before the run."""
