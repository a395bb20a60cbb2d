"""Facts about the embedded engine."""

from lightrft.engines.factory import EngineFacts

FACTS = EngineFacts(
    "lightrft.engines.hf.engine:HFEngine",
    holds_adapters=True,
    takes_packed=True,
    has_own_memory=False,
)
