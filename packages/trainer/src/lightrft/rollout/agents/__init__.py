"""Agents that run their loop themselves: their calls to an endpoint in this process become rows."""
