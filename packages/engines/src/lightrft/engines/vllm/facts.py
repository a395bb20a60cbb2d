"""Facts about vLLM."""

from lightrft.engines.factory import EngineFacts

FACTS = EngineFacts(
    "lightrft.engines.vllm.engine:VLLMEngine",
    package="vllm",
    holds_adapters=True,
    spans_ranks=True,
    needs_share=True,
    known_order="min_p first",
)
