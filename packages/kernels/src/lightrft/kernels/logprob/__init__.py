"""Logprobs and entropy of targets from hidden states, without storing all logits."""
