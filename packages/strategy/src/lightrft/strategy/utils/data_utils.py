"""Sampling of a data set over ranks."""

from lightrft.strategy.sampler import DistributedSampler as DistributedSampler
