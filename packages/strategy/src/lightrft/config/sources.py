"""Lists of data sources in one text. Standard library only."""

import os.path
from collections.abc import Sequence


def split_sources(text: str) -> tuple[str, ...]:
    """Return the sources of a comma-separated list; an existing path is one, commas included."""
    # Unlike Path.exists, false for text that no file system accepts as a name.
    if os.path.exists(text):
        return (text,)
    return tuple(part.strip() for part in text.split(",") if part.strip()) or (text,)


def has_splits(text: str | None) -> bool:
    """Return whether any source has named parts: folders and data sets have them, files do not."""
    return text is not None and any(not os.path.isfile(source) for source in split_sources(text))


def probability_problem(sources: Sequence[str], probabilities: Sequence[float]) -> str | None:
    """Return the misfit of probabilities and sources; None if they fit."""
    if not probabilities or tuple(probabilities) == (1.0,):
        return None
    if len(probabilities) != len(sources):
        return (
            f"prompt_data_probs must have one number per source of prompt_data: got "
            f"{len(probabilities)} for {len(sources)}"
        )
    if min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        shown = ", ".join(f"{value:g}" for value in probabilities)
        return f"prompt_data_probs must be positive with sum 1: got {shown}"
    return None
