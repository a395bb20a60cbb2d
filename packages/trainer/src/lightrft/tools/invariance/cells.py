"""Ways to carry out one training step, and how far their results may lie apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

Backend = Literal["fake", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
Role = Literal["actor", "critic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to carry out a step.

    Args:
        backend: Strategy; "hsdp" is FSDP2 with shards over two ranks and replicas of them.
        world_size: Processes.
        micro_batch_size: Rows of one forward and backward pass, at most.
        packs_samples: Lay rows out as one stream.
        sp_size: Ranks that share a stream.
        recomputes: Gradient checkpointing.
        is_fused: Logprobs by chunks of the vocabulary.
        loss_inside: The loss by chunks of tokens, inside the output projection; needs `is_fused`.
        role: What is trained.
        bf16: Compute in bfloat16.
        offloads: FSDP2's parameters, gradients and states, or ZeRO's states, are on the CPU.
        keeps_masters: FSDP2's shards are bfloat16 beside float32 masters (`use_mp_opt`).
        compiler: Backend with which FSDP2 compiles every block; None compiles none.
    """

    backend: Backend = "fake"
    world_size: int = 1
    micro_batch_size: int = 8
    packs_samples: bool = False
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


# One process, one padded micro-batch of all rows: what every other cell is compared with.
REFERENCE = Cell()


@dataclass(frozen=True, slots=True)
class Deviations:
    """Differences between a cell's results and the reference's.

    Args:
        outputs: Largest difference of a logprob; of values, over the largest value.
        loss: Difference of the batch loss, over its magnitude.
        weights: Weights after a step of SGD: norm of the difference over the norm.
        gradient: Gradient of that step, likewise over all parameters.
        gradient_tensor: The same for the worst single tensor whose norm exceeds 1e-4 of the whole.
        update: Change of the weights by two steps of AdamW, over all parameters.
    """

    outputs: float
    loss: float
    weights: float
    gradient: float
    gradient_tensor: float
    update: float

    def above(self, bounds: Deviations) -> list[str]:
        """Names of the deviations that are above their bounds, or no numbers."""
        return [
            name
            for name in self.__dataclass_fields__
            # Written so that NaN fails.
            if not self.value(name) <= bounds.value(name)
        ]

    def value(self, name: str) -> float:
        """One deviation by name."""
        return float(asdict(self)[name])


# Bounds of the norms in float32; those of outputs and loss are a few roundings of logits.
FP32_BOUNDS = Deviations(
    outputs=2e-5, loss=1e-5, weights=1e-6, gradient=1e-6, gradient_tensor=5e-6, update=1e-3
)


# In bfloat16 one way rounds as much as another, and other sums are rounded otherwise.
BF16_FACTOR = 3.0


def bf16_bounds(plainest: Deviations) -> Deviations:
    """Bounds of a way in bfloat16 against float32, from the deviation of the plainest way.

    Args:
        plainest: Deviations of one process with one padded micro-batch in bfloat16.
    """
    names = Deviations.__dataclass_fields__
    return Deviations(
        **{n: max(FP32_BOUNDS.value(n), BF16_FACTOR * plainest.value(n)) for n in names}
    )


def doctor_cells(world_size: int, *, has_deepspeed: bool, bf16: bool = False) -> tuple[Cell, ...]:
    """A set in which every feature occurs, small enough for a user's own model.

    In bfloat16 the plainest way comes first, since it gives the bounds.
    """
    cells = [
        Cell(micro_batch_size=2),
        Cell(micro_batch_size=4, packs_samples=True),
        Cell(micro_batch_size=4, recomputes=True, is_fused=True, loss_inside=True),
    ]
    if world_size > 1:
        packed = Cell(backend="fsdp", world_size=world_size, micro_batch_size=4, packs_samples=True)
        padded = replace(packed, micro_batch_size=2, packs_samples=False)
        cells += [padded, packed, replace(packed, sp_size=world_size, recomputes=True)]
        if bf16:
            cells.append(replace(padded, offloads=True, keeps_masters=True))
        if has_deepspeed:
            fused = replace(packed, backend="zero3", is_fused=True)
            cells += [replace(padded, backend="zero2", offloads=bf16), fused]
    return tuple(replace(cell, bf16=bf16) for cell in ([REFERENCE] if bf16 else []) + cells)
