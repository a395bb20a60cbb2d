"""Floating-point operations of an update, and their share of the hardware's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightrft.config import RowRunOptions
from lightrft.stages.stage import Work
from lightrft.strategy.backend import inner_module
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, checkpoint_module

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Operations of one forward and backward pass of a model.

    Multiplications and additions count one each. A weight costs 6 a token, a frozen one 4: it
    gets no gradient. Attention costs 6 heads * head_dim a layer and pair of tokens that see each
    other twice over, s^2 / 2 pairs. Recomputation by gradient checkpointing does not count.

    Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B, with causal attention.

    Args:
        per_token: Operations of the layers.
        per_scored_token: Operations of the output projection, which sees sampled tokens only.
        per_squared_length: Operations of attention.
    """

    per_token: float
    per_scored_token: float
    per_squared_length: float

    def total(self, lengths: NDArray[np.int64], sampled_lengths: NDArray[np.int64]) -> float:
        """Return the operations for rows of these lengths, padding not counted."""
        return float(
            self.per_token * lengths.sum()
            + self.per_scored_token * sampled_lengths.sum()
            + self.per_squared_length * (lengths.astype(float) ** 2).sum()
        )


def training_flops(model: nn.Module, source: ParameterSource) -> TrainingFlops | None:
    """Return the operations of a prepared model; None if it holds no transformers model.

    Args:
        model: Model as the strategy wrapped it.
        source: Parameters of the model, whole or sharded.
    """
    from transformers import PreTrainedModel

    root = checkpoint_module(inner_module(model))
    pretrained = root if isinstance(root, PreTrainedModel) else _inner(root)
    if pretrained is None:
        return None
    embeddings = pretrained.get_input_embeddings()
    lookup_name = next((n for n, m in root.named_modules() if m is embeddings), "") + ".weight"
    is_tied = lookup_name in source.tied_names.values()
    head, layers = 0.0, 0.0
    share = _active_share(pretrained.config)
    for entry in source.parameters():
        cost = float(entry.numel * (4 if entry.frozen else 6))
        is_matrix = len(entry.shape) >= 2
        if entry.checkpoint_name == lookup_name:
            # A lookup costs nothing; tied, it is the output projection too.
            head += cost if is_tied else 0.0
        elif entry.checkpoint_name.startswith("lm_head."):
            head += cost if is_matrix else 0.0
        elif is_matrix:
            layers += cost * (share if ".experts." in entry.checkpoint_name else 1.0)
    text = pretrained.config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0)  # none in state spaces
    size = text.to_dict().get("head_dim") or text.hidden_size // max(1, num_heads)
    return TrainingFlops(layers, head, 6.0 * text.num_hidden_layers * num_heads * size)


def peak_tflops(config: RowRunOptions) -> float | None:
    """Return the device's peak in 1e12 operations per second: as set, or a known GPU's in bf16."""
    has_gpu = torch.cuda.is_available()
    if config.peak_tflops is not None:
        return config.peak_tflops
    if not has_gpu or not config.computes_in_bf16(has_gpu=has_gpu):
        return None
    from lightrft.run.gpus import gpu_of

    gpu = gpu_of(torch.cuda.get_device_name())
    return None if gpu is None else gpu.tflops


def utilisation(
    costs: Sequence[TrainingFlops],
    work: Work,
    *,
    seconds: float,
    num_devices: int,
    peak: float | None,
) -> dict[str, float]:
    """Return `train_tflops_per_second` per device and, if the peak is known, its share `mfu`.

    Args:
        costs: Costs of each model in training; without any the result is {}.
        work: Rows of all ranks.
        seconds: Duration of the update.
        num_devices: Number of devices that share the work.
        peak: Peak of one device, in 1e12 operations per second, or None.
    """
    if not costs:
        return {}
    flops = work.num_passes * sum(cost.total(work.lengths, work.scored_lengths) for cost in costs)
    achieved = flops / seconds / num_devices / 1e12
    rates = {"train_tflops_per_second": achieved}
    return rates if peak is None else {**rates, "mfu": achieved / peak}


def _inner(root: nn.Module) -> PreTrainedModel | None:
    from transformers import PreTrainedModel

    models = [child for child in root.children() if isinstance(child, PreTrainedModel)]
    return models[0] if models else None


def _active_share(config: PretrainedConfig) -> float:
    """Return the share of the experts that a token passes through."""
    values = config.get_text_config().to_dict()
    counts: Sequence[object] = (values.get("num_experts"), values.get("num_local_experts"))
    total = next((count for count in counts if isinstance(count, int) and count > 0), None)
    active = values.get("num_experts_per_tok")
    return active / total if total is not None and isinstance(active, int) else 1.0
