"""`linear_logprob` of DTensors: what placements mean, and the rule of its operators.

A weight split over its rows serves tokens that every rank holds: each rank computes its part of the
vocabulary (`VocabShard`). Any other weight is gathered, and ranks compute the tokens they hold.
Imported where a DTensor is met; torch.distributed.tensor takes a second to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightrft.kernels.logprob.operators import (
    NUM_SAVED,
    NUM_TENSORS,
    logprob_backward,
    logprob_forward,
)
from lightrft.kernels.logprob.types import VocabShard

_Placements = list[Placement | None]
_Rules = list[tuple[_Placements, _Placements]]


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """What this rank computes.

    Args:
        arguments: hidden, weight, targets and bias of the operator, and the part of the vocabulary
            that the weight is, or None if it is all of it.
        mesh: Where results are replicated if a part was computed; None: they are DTensors.
    """

    arguments: tuple[Tensor, Tensor, Tensor, Tensor | None, VocabShard | None]
    mesh: DeviceMesh | None

    def distribute(self, result: Tensor) -> Tensor:
        """A result as a DTensor."""
        if self.mesh is None:
            return result
        return DTensor.from_local(result, self.mesh, [Replicate()], run_check=False)


def localize(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> LocalProblem:
    """Reads the placements.

    Raises:
        ValueError: Some are DTensors and some are not, or they live on different meshes.
    """
    given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}
    plain = [n for n, t in given.items() if t is not None and not isinstance(t, DTensor)]
    if plain or not isinstance(hidden, DTensor) or not isinstance(weight, DTensor):
        raise ValueError(
            f"expected DTensors only, or none: got plain {', '.join(plain)}; say which tokens a "
            "rank holds with DTensor.from_local(tensor, mesh, [Replicate()]) or [Shard(0)]"
        )
    mesh = weight.device_mesh
    if hidden.device_mesh != mesh:
        raise ValueError(
            f"hidden and weight must be on one device mesh: got {hidden.device_mesh} and {mesh}"
        )
    if mesh.ndim == 1 and weight.placements == (Shard(0),) and hidden.placements == (Replicate(),):
        return _split_vocabulary(hidden, weight, targets, bias, mesh)
    everywhere = [Replicate()] * mesh.ndim
    # Visible to autograd: a gathered weight's gradient comes back in the weight's placements.
    whole = weight.redistribute(mesh, everywhere)
    whole_bias = bias.redistribute(mesh, everywhere) if isinstance(bias, DTensor) else None
    return LocalProblem((hidden, whole, targets, whole_bias, None), None)


def _split_vocabulary(
    hidden: DTensor, weight: DTensor, targets: Tensor, bias: Tensor | None, mesh: DeviceMesh
) -> LocalProblem:
    vocab_size = weight.shape[0]
    rows_per_rank = -(-vocab_size // mesh.size())
    start = min(mesh.get_local_rank() * rows_per_rank, vocab_size)
    local_bias = None
    if isinstance(bias, DTensor):
        local_bias = bias.redistribute(mesh, [Shard(0)]).to_local(grad_placements=[Shard(0)])
    if isinstance(targets, DTensor):
        targets = targets.redistribute(mesh, [Replicate()]).to_local()
    whole_hidden = hidden.to_local(grad_placements=[Replicate()])
    own_rows = weight.to_local(grad_placements=[Shard(0)])
    shard = VocabShard(mesh.get_group(), start, vocab_size)
    return LocalProblem((whole_hidden, own_rows, targets, local_bias, shard), mesh)


def _entropies(rows: Placement, options: Sequence[object]) -> Placement:
    """Placement of the entropies; without an element they cannot be split."""
    return Replicate() if options[3] == "none" else rows


@register_sharding(logprob_forward)  # type: ignore[untyped-decorator]
def _of_forward(*arguments: object) -> _Rules:
    """Rows are independent: all tokens everywhere, or each rank's own with the whole weight."""
    options = arguments[NUM_TENSORS:]
    rules: _Rules = []
    for rows in (Replicate(), Shard(0)):
        placements = (rows, Replicate(), Replicate(), rows, Replicate())
        inputs = _of_present(arguments, placements)
        rules.append(([rows, _entropies(rows, options), rows, rows], inputs))
    return rules


@register_sharding(logprob_backward)  # type: ignore[untyped-decorator]
def _of_backward(*arguments: object) -> _Rules:
    """Gradients of the weight and the bias add up over the ranks that hold other tokens."""
    options = arguments[NUM_SAVED:]
    rules: _Rules = []
    for rows, total in ((Replicate(), Replicate()), (Shard(0), Partial())):
        upstream = (rows, rows)
        results = (rows, _entropies(rows, options), rows, rows)
        inputs = (rows, Replicate(), Replicate(), rows)
        placements = _of_present(arguments, (*upstream, *inputs, *results))
        rules.append(([rows, total, total], placements))
    return rules


def _of_present(arguments: Sequence[object], placements: Sequence[Placement]) -> _Placements:
    """Placements of the leading arguments, tensors; none for those not given and for options."""
    given = [
        None if argument is None else placement
        for argument, placement in zip(arguments, placements, strict=False)
    ]
    return [*given, *[None] * (len(arguments) - len(given))]
