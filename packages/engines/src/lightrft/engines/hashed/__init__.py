"""The "hashed" engine: completions of a known distribution, without a forward pass."""
