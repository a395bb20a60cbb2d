"""What is wrong with a data file."""

from __future__ import annotations


class DataError(ValueError):
    """A data file cannot be used; the message names the file, the line and the remedy."""
