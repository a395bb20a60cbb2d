"""Other projects' operations behind one signature, where they can be imported.

And a candidate of this one, which is no part of it before it was measured.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    LogprobFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits, widened: what a model's own head and a log_softmax do."""
    logits = (hidden @ weight.T).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)


def load(
    device: torch.device, kind: str = "logprobs"
) -> tuple[dict[str, LogprobFunction], dict[str, str]]:
    """Peers that run here, and the reason for each that does not.

    Those of the kind "mean loss" return one number, whose gradient needs three products.
    """
    found: dict[str, LogprobFunction] = {}
    absent: dict[str, str] = {}
    for name, (needs_cuda, make) in _PEERS[kind].items():
        if needs_cuda and device.type != "cuda":
            absent[name] = "needs a GPU"
            continue
        try:
            found[name] = make()
        except (ImportError, AttributeError) as err:
            absent[name] = f"peer absent: {err}"
    return found, absent


def _trl() -> LogprobFunction:
    function = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    return lambda hidden, weight, targets: _first(
        function.apply(hidden, weight, None, targets, 1.0, 4096, None, 1.0, ())
    )


def _liger() -> LogprobFunction:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss = function.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "none")
        return -_first(loss)

    return run


def _liger_mean() -> LogprobFunction:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction
    return lambda hidden, weight, targets: _first(function.apply(hidden, weight, targets))


def _quack_mean() -> LogprobFunction:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda hidden, weight, targets: function(
        hidden, weight, targets, chunk_size=4096, ignore_index=-100, reduction="mean"
    )


def _verl() -> LogprobFunction:
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return lambda hidden, weight, targets: _first(
        module.linear_cross_entropy(hidden, weight, targets, 1.0, "none")
    )


def _cut_cross_entropy() -> LogprobFunction:
    module = importlib.import_module("cut_cross_entropy")
    return lambda hidden, weight, targets: (
        -module.linear_cross_entropy(hidden, weight, targets, reduction="none")
    )


def _cute_candidate() -> LogprobFunction:
    if torch.cuda.get_device_capability() != (9, 0):
        raise ImportError("it is written for sm_90")
    module = importlib.import_module("gpu.cute_forward")

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        try:
            return module.logprobs(hidden.detach(), weight.detach(), targets)
        # Any fault of a compiler or launch: it is listed with its reason.
        except Exception as err:
            raise RuntimeError(f"{type(err).__name__}: {err}") from err

    return run


def _compiled() -> LogprobFunction:
    return torch.compile(naive, dynamic=False)


def _first(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


_PEERS = {
    "logprobs": {
        "trl chunked": (False, _trl),
        "torch.compile": (True, _compiled),
        "liger": (True, _liger),
        "verl": (True, _verl),
        "cut-cross-entropy": (True, _cut_cross_entropy),
        "our CuTe candidate": (True, _cute_candidate),
    },
    "mean loss": {"liger mean loss": (True, _liger_mean), "quack mean loss": (True, _quack_mean)},
}
