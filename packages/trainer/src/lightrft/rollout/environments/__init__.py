"""Environments and tools of episodes."""
