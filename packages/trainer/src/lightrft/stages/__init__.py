"""Stages of training: what a step computes and learns."""
