"""Kernels for sequences of unequal lengths, as versions of torch may have them, for a CPU."""

import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightrft.models import varlen


def attended(query, key, value, bounds, scale, window, *, mixes=False, is_top_left=False):
    pieces = []
    queries, keys = ([0, int(b[-1])] if mixes else b.tolist() for b in bounds[:2])
    spans = zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True)
    for (start, stop), (first, last) in spans:
        num_before = 0 if is_top_left else last - first - (stop - start)
        distance = num_before + torch.arange(stop - start)[:, None] - torch.arange(last - first)
        mask = distance >= 0
        if window[0] >= 0:
            mask = mask & (distance <= window[0])
        q = query[start:stop].transpose(0, 1)[None]
        k, v = (x[first:last].transpose(0, 1)[None] for x in (key, value))
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
            )
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


def without_argument(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """Torch 2.11's interface: grouped heads go on to the kernel, which takes them."""
    return attended(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


def with_argument(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Torch 2.13's."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return attended(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


def aligning_starts(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    """A kernel whose first query sees the first key alone, whatever the number of keys."""
    return attended(query, key, value, bounds, scale, window_size, is_top_left=True)


def raising(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    """A kernel that takes no grouped heads."""
    raise RuntimeError("Number of heads in key/value must be that of query\nin a long story")


def mixing(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    """A kernel that sees over the borders of sequences."""
    return attended(query, key, value, bounds, scale, window_size, mixes=True)


def losing_gradients(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    """A kernel whose backward pass forgets keys."""
    return attended(query, key.detach() + 0 * key, value, bounds, scale, window_size)


def plant(monkeypatch, kernel):
    """Let this torch have a kernel, on any device."""
    monkeypatch.setattr(varlen, "known_trials", {})
    monkeypatch.setattr(varlen, "kernel_hindrance", lambda shape: None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
