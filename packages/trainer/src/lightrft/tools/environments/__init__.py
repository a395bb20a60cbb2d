"""Adapters of other environment interfaces."""
