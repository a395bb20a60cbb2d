"""Capabilities are plain facts about this process."""

from __future__ import annotations

import importlib.util

import torch

from lightrft.kernels import capabilities
from lightrft.kernels.weight_bucket.native import load_extension


def test_capabilities_agree_with_what_can_be_imported():
    found = capabilities()
    assert found.native_extension == (load_extension() is not None)
    assert found.triton == (importlib.util.find_spec("triton") is not None)
    assert found.cuda == torch.cuda.is_available()
    assert (found.cuda_capability is None) == (not found.cuda)
    assert found.native_extension or not found.cuda_extension
