"""Exact fused linear-logprob and weight buckets; depends only on torch."""

from typing import TYPE_CHECKING

from lightrft.kernels.lazy import lazy_names

if TYPE_CHECKING:
    from lightrft.kernels.hardware import capabilities as capabilities
    from lightrft.kernels.logprob.dispatch import linear_logprob as linear_logprob
    from lightrft.kernels.logprob.policy_loss import linear_policy_loss as linear_policy_loss
    from lightrft.kernels.logprob.types import Workspace as Workspace
    from lightrft.kernels.weight_bucket.broadcaster import BucketBroadcaster as BucketBroadcaster
    from lightrft.kernels.weight_bucket.layout import (
        BucketLayout as BucketLayout,
        TensorSpec as TensorSpec,
        WeightPiece as WeightPiece,
    )
    from lightrft.kernels.weight_bucket.operations import (
        hash_tensor as hash_tensor,
        hash_tensors as hash_tensors,
        pack as pack,
        unpack as unpack,
    )
    from lightrft.kernels.weight_bucket.reference import combine_hashes as combine_hashes

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
