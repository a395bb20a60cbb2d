"""Exact fused linear-logprob and weight buckets; depends on torch alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.kernels.hardware import capabilities as capabilities
    from lightrft.kernels.logprob.dispatch import linear_logprob as linear_logprob
    from lightrft.kernels.logprob.policy_loss import linear_policy_loss as linear_policy_loss
    from lightrft.kernels.logprob.types import VocabShard as VocabShard
    from lightrft.kernels.logprob.types import Workspace as Workspace
    from lightrft.kernels.weight_bucket.broadcaster import BucketBroadcaster as BucketBroadcaster
    from lightrft.kernels.weight_bucket.layout import BucketLayout as BucketLayout
    from lightrft.kernels.weight_bucket.layout import TensorSpec as TensorSpec
    from lightrft.kernels.weight_bucket.operations import hash_tensor as hash_tensor
    from lightrft.kernels.weight_bucket.operations import pack as pack
    from lightrft.kernels.weight_bucket.operations import unpack as unpack
    from lightrft.kernels.weight_bucket.reference import combine_hashes as combine_hashes

_MODULES = {
    "BucketBroadcaster": "weight_bucket.broadcaster",
    "BucketLayout": "weight_bucket.layout",
    "TensorSpec": "weight_bucket.layout",
    "VocabShard": "logprob.types",
    "Workspace": "logprob.types",
    "capabilities": "hardware",
    "combine_hashes": "weight_bucket.reference",
    "hash_tensor": "weight_bucket.operations",
    "linear_logprob": "logprob.dispatch",
    "linear_policy_loss": "logprob.policy_loss",
    "pack": "weight_bucket.operations",
    "unpack": "weight_bucket.operations",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
