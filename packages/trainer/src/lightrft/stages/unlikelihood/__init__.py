"""Unlikelihood training as a stage: good answers become likelier, bad ones less likely."""
