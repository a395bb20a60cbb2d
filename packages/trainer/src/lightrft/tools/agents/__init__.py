"""Agents that are programs."""
