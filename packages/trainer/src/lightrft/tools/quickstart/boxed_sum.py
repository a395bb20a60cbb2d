r"""A reward function as a user writes one: 1 if the response ends in the right \boxed{}, else 0."""

import re
from collections.abc import Sequence

BOX_AT_END = re.compile(r"\\boxed\{(\d+)\}\Z")


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    labels: Sequence[str],
    **columns: Sequence[object],
) -> list[float]:
    """Return one reward per response; `labels` are the right sums, other columns are unused."""
    boxes = [BOX_AT_END.search(response) for response in responses]
    return [
        float(box is not None and box.group(1) == label)
        for box, label in zip(boxes, labels, strict=True)
    ]
