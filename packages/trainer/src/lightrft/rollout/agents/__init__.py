"""Agents that run their loop themselves: their calls of an endpoint in this process become rows."""
