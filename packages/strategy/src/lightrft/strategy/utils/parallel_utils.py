"""Sequence parallelism."""

from lightrft.strategy.distributed.sequence_parallel import SPDataProcessor as SPDataProcessor
