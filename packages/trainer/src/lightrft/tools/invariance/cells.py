"""Ways to run one training step, and bounds of how far their results may differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

Backend = Literal["fake", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
Role = Literal["actor", "critic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to run a step.

    Args:
        backend: Strategy; "hsdp" is FSDP2 with shards over two ranks and replicas of them.
        world_size: Number of processes.
        micro_batch_size: Rows of one forward and backward pass, at most.
        packs_samples: Whether to lay rows out as one stream.
        shares_prefixes: Whether tokens that rows of a stream begin with alike stand once.
        sp_size: Ranks that share a stream.
        recomputes: Whether gradient checkpointing is on.
        is_fused: Whether logprobs are computed by chunks of the vocabulary.
        loss_inside: Whether the loss is computed by chunks of tokens, inside the output projection;
            needs `is_fused`.
        role: Role of the trained model.
        bf16: Whether to compute in bfloat16.
        offloads: Whether FSDP2's parameters, gradients and states, or ZeRO's states, are on a CPU.
        keeps_masters: Whether FSDP2's shards are bfloat16 beside float32 masters (`use_mp_opt`).
        compiler: Backend with which FSDP2 compiles every block; None compiles none.
    """

    backend: Backend = "fake"
    world_size: int = 1
    micro_batch_size: int = 8
    packs_samples: bool = False
    shares_prefixes: bool = False
    sp_size: int = 1
    recomputes: bool = False
    is_fused: bool = False
    loss_inside: bool = False
    role: Role = "actor"
    bf16: bool = False
    offloads: bool = False
    keeps_masters: bool = False
    compiler: str | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.backend} x{self.world_size}",
            f"micro {self.micro_batch_size}",
            "packed" if self.packs_samples else "padded",
            "shared" if self.shares_prefixes else "",
            f"sp {self.sp_size}" if self.sp_size > 1 else "",
            "recomputed" if self.recomputes else "",
            "fused" if self.is_fused else "",
            "loss inside" if self.loss_inside else "",
            self.role if self.role == "critic" else "",
            "bf16" if self.bf16 else "",
            "offloaded" if self.offloads else "",
            "masters" if self.keeps_masters else "",
            f"compiled by {self.compiler}" if self.compiler else "",
        ]
        return ", ".join(part for part in parts if part)


# One process, one padded micro-batch of all rows, with which every other cell is compared.
REFERENCE = Cell()


@dataclass(frozen=True, slots=True)
class Deviations:
    """Differences between a cell's results and the reference's.

    Args:
        outputs: Largest difference of a logprob; of values, over the largest value.
        loss: Difference of the batch loss, over its magnitude.
        weights: Weights after a step of SGD: norm of the difference over the norm.
        gradient: Gradient of that step, likewise over all parameters.
        gradient_tensor: Gradient of the worst single tensor whose norm exceeds 1e-4 of the whole.
        update: Change of the weights by two steps of AdamW, over all parameters.
    """

    outputs: float
    loss: float
    weights: float
    gradient: float
    gradient_tensor: float
    update: float

    def above(self, bounds: Deviations) -> list[str]:
        """Return the names of deviations that are above their bounds, or no numbers."""
        return [
            name
            for name in self.__dataclass_fields__
            # Written so that NaN fails.
            if not self.value(name) <= bounds.value(name)
        ]

    def value(self, name: str) -> float:
        """Return one deviation by name."""
        return float(asdict(self)[name])


# Bounds of the norms in float32; those of outputs and loss are a few roundings of logits.
FP32_BOUNDS = Deviations(
    outputs=2e-5, loss=1e-5, weights=1e-6, gradient=1e-6, gradient_tensor=5e-6, update=1e-3
)


# All ways round about as much, and different sums round differently.
ROUNDING_FACTOR = 3.0


def rounding_bounds(plainest: Deviations) -> Deviations:
    """Return bounds of a way against float32, from the plainest way's deviation.

    Args:
        plainest: Deviations of one process with padded micro-batches in the same dtype.
    """
    names = Deviations.__dataclass_fields__
    return Deviations(
        **{n: max(FP32_BOUNDS.value(n), ROUNDING_FACTOR * plainest.value(n)) for n in names}
    )


def doctor_cells(world_size: int, *, has_deepspeed: bool, bf16: bool = False) -> tuple[Cell, ...]:
    """Return cells that cover every feature, few enough for a user's model.

    In bfloat16 the plainest way comes first, since it gives the bounds.
    """
    cells = [
        Cell(micro_batch_size=2),
        Cell(micro_batch_size=4, packs_samples=True),
        Cell(micro_batch_size=4, packs_samples=True, shares_prefixes=True),
        Cell(micro_batch_size=4, recomputes=True, is_fused=True, loss_inside=True),
    ]
    if world_size > 1:
        packed = Cell(backend="fsdp", world_size=world_size, micro_batch_size=4, packs_samples=True)
        padded = replace(packed, micro_batch_size=2, packs_samples=False)
        shared = replace(packed, shares_prefixes=True)
        cells += [padded, packed, shared, replace(packed, sp_size=world_size, recomputes=True)]
        if bf16:
            cells.append(replace(padded, offloads=True, keeps_masters=True))
        if has_deepspeed:
            fused = replace(packed, backend="zero3", is_fused=True)
            cells += [replace(padded, backend="zero2", offloads=bf16), fused]
    return tuple(replace(cell, bf16=bf16) for cell in ([REFERENCE] if bf16 else []) + cells)
