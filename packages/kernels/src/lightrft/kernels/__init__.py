"""Exact fused linear-logprob and weight buckets; depends on torch alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.kernels.hardware import KernelCapabilities, capabilities
    from lightrft.kernels.logprob.dispatch import linear_logprob
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
    "Segment": "weight_bucket.layout",
    "TensorSpec": "weight_bucket.layout",
    "VocabShard": "logprob.types",
    "Workspace": "logprob.types",
    "capabilities": "hardware",
    "combine_hashes": "weight_bucket.reference",
    "hash_tensor": "weight_bucket.operations",
    "linear_logprob": "logprob.dispatch",
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
    "Segment",
    "TensorSpec",
    "VocabShard",
    "Workspace",
    "capabilities",
    "combine_hashes",
    "hash_tensor",
    "linear_logprob",
    "pack",
    "unpack",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
