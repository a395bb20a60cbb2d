"""Fully sharded data parallelism on DTensors."""
