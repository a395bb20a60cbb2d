"""Facts about SGLang."""

from lightrft.engines.facts import EngineFacts, combines


def has_known_order(*, top_k: int, top_p: float, min_p: float) -> bool:
    """Return False if truncations act together: SGLang takes top_p of the mass before top_k."""
    return not combines(top_k=top_k, top_p=top_p, min_p=min_p)


FACTS = EngineFacts(
    "lightrft.engines.sglang.engine:SGLangEngine",
    package="sglang",
    versions=((0, 5, 21), (0, 6)),
    draws_min_p=False,
    spans_ranks=True,
    has_known_order=has_known_order,
)
