"""Reward models as a stage: scores of answers that people or rules have compared."""
