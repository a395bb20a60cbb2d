"""Whether the trainer can find again which tokens an engine's truncation kept."""

from __future__ import annotations

from lightrft.engines.truncation import has_known_order
from lightrft.engines.types import SamplingParams
from lightrft.models.support import SamplingSupport


def replayed_support(params: SamplingParams, engine_name: str | None) -> SamplingSupport | None:
    """What the forward pass replays; None if nothing was excluded or it is not known in what order.

    Args:
        params: How the samples were drawn.
        engine_name: Of the engine that drew them.
    """
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    is_known = has_known_order(engine_name, top_k=top_k, top_p=top_p, min_p=min_p)
    if not params.truncates or not is_known:
        return None
    return SamplingSupport(top_k, top_p, min_p)
