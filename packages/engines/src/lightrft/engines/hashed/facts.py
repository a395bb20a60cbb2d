"""Facts about the engine of hashes."""

from lightrft.engines.factory import EngineFacts

FACTS = EngineFacts("lightrft.engines.hashed.engine:HashedEngine", has_own_memory=False)
