"""Ranks, groups, collectives and deadlines."""
