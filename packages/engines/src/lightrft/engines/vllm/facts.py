"""Facts about vLLM."""

from lightrft.engines.facts import EngineFacts, combines


def has_known_order(*, top_k: int, top_p: float, min_p: float) -> bool:
    """Return False if min_p and another truncation act together: vLLM applies min_p first."""
    return not (min_p > 0 and combines(top_k=top_k, top_p=top_p, min_p=min_p))


FACTS = EngineFacts(
    "lightrft.engines.vllm.engine:VLLMEngine",
    package="vllm",
    versions=((0, 32), (0, 33)),
    holds_adapters=True,
    spans_ranks=True,
    needs_share=True,
    has_known_order=has_known_order,
)
