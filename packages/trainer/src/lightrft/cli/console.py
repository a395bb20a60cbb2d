"""The terminal and the processors."""

import os


def hide_progress_bars() -> None:
    """Keep transformers from drawing a bar for every checkpoint it reads or writes."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def share_processors() -> None:
    """Let waiting threads give up their processor soon; to be called before torch is imported.

    OpenMP threads spin while they wait. On a machine with other work the spinning thread keeps
    the processor from the one it waits for, and two threads become ten times slower than one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "100")
