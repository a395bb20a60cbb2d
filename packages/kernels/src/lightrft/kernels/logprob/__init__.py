"""Logprobs and entropy of targets straight from hidden states, without storing all logits."""
