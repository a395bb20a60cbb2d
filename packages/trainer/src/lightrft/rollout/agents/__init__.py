"""Agents that own their loop: an endpoint in this process, and what they call becomes rows."""
