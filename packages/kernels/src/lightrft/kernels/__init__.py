"""Exact fused linear-logprob and weight buckets; depends on torch alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.kernels.hardware import KernelCapabilities, capabilities
    from lightrft.kernels.logprob.dispatch import linear_logprob
    from lightrft.kernels.logprob.fused_loss import linear_policy_loss
    from lightrft.kernels.logprob.policy_loss import PolicyLossOutput, TokenLossFunction
    from lightrft.kernels.logprob.types import LogprobOutput, VocabShard, Workspace
    from lightrft.kernels.weight_bucket.broadcaster import (
        BucketBroadcaster,
        BucketPiece,
        FilledBucket,
    )
    from lightrft.kernels.weight_bucket.layout import Bucket, BucketLayout, Segment, TensorSpec
    from lightrft.kernels.weight_bucket.operations import hash_tensor, pack, unpack
    from lightrft.kernels.weight_bucket.reference import combine_hashes

_MODULES = {
    "Bucket": "weight_bucket.layout",
    "BucketBroadcaster": "weight_bucket.broadcaster",
    "BucketLayout": "weight_bucket.layout",
    "BucketPiece": "weight_bucket.broadcaster",
    "FilledBucket": "weight_bucket.broadcaster",
    "KernelCapabilities": "hardware",
    "LogprobOutput": "logprob.types",
    "PolicyLossOutput": "logprob.policy_loss",
    "Segment": "weight_bucket.layout",
    "TensorSpec": "weight_bucket.layout",
    "TokenLossFunction": "logprob.policy_loss",
    "VocabShard": "logprob.types",
    "Workspace": "logprob.types",
    "capabilities": "hardware",
    "combine_hashes": "weight_bucket.reference",
    "hash_tensor": "weight_bucket.operations",
    "linear_logprob": "logprob.dispatch",
    "linear_policy_loss": "logprob.fused_loss",
    "pack": "weight_bucket.operations",
    "unpack": "weight_bucket.operations",
}

__all__ = [
    "Bucket",
    "BucketBroadcaster",
    "BucketLayout",
    "BucketPiece",
    "FilledBucket",
    "KernelCapabilities",
    "LogprobOutput",
    "PolicyLossOutput",
    "Segment",
    "TensorSpec",
    "TokenLossFunction",
    "VocabShard",
    "Workspace",
    "capabilities",
    "combine_hashes",
    "hash_tensor",
    "linear_logprob",
    "linear_policy_loss",
    "pack",
    "unpack",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
