"""Reward kinds with needs of their own."""
