"""The terminal."""

from __future__ import annotations


def hide_progress_bars() -> None:
    """Keep transformers from drawing a bar for every checkpoint it reads or writes."""
    from transformers.utils import logging

    logging.disable_progress_bar()
