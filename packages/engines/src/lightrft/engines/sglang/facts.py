"""Facts about SGLang."""

from lightrft.engines.factory import EngineFacts

FACTS = EngineFacts(
    "lightrft.engines.sglang.engine:SGLangEngine",
    package="sglang",
    draws_min_p=False,
    spans_ranks=True,
    known_order="other",  # SGLang takes top_p of the mass before top_k
)
