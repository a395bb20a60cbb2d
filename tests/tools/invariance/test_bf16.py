"""In bfloat16, too, a step is the same however it is accumulated, sharded and offloaded.

Every strategy x dtype x offload x master weights x accumulation is compared with one process and
one padded micro-batch in float32. By default a handful runs, and with `-m slow` the product.
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import pytest
from tests.models.tiny import SPECIAL, tiny_model
from tests.ranks import run_multiprocess

from lightrft.tools.invariance.batch import NUM_ROWS
from lightrft.tools.invariance.cells import (
    FP32_BOUNDS,
    REFERENCE,
    Cell,
    Deviations,
    bf16_bounds,
    doctor_cells,
)
from lightrft.tools.invariance.measure import measure_cells, write_reference

pytestmark = pytest.mark.shard("invariance_bf16")

WORLDS = {"zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2, "hsdp": 4}
# Largest values over the product, on a CPU: outputs 0.026, loss 0.0031, gradient and weights
# 0.0166, one tensor 0.030, update 0.154; processors differ in how they sum.
BF16_BOUNDS = Deviations(
    outputs=0.06, loss=0.01, weights=0.035, gradient=0.035, gradient_tensor=0.07, update=0.35
)


def product() -> list[Cell]:
    """Every choice; accumulation is by micro-batches of 1, 2 or all rows of a rank."""
    cells = []
    for backend, bf16, offloads, masters in itertools.product(
        WORLDS, (False, True), (False, True), (False, True)
    ):
        if masters and not (bf16 and backend in ("fsdp", "hsdp")):
            continue
        world = WORLDS[backend]
        cells += [
            Cell(
                backend=backend,
                world_size=world,
                micro_batch_size=size,
                bf16=bf16,
                offloads=offloads,
                keeps_masters=masters,
            )
            for size in (1, 2, NUM_ROWS // world)
            if size == 1 or size < 4 or world == 2
        ]
    return [cell for cell in dict.fromkeys(cells) if is_available(cell)]


def is_available(cell: Cell) -> bool:
    return find_spec("deepspeed") is not None or not cell.backend.startswith("zero")


HANDFUL = [
    cell
    for cell in (
        Cell(backend="zero2", world_size=2, micro_batch_size=1, bf16=True),
        Cell(backend="zero2", world_size=2, micro_batch_size=2, bf16=True, offloads=True),
        Cell(backend="zero3", world_size=2, micro_batch_size=4, bf16=True),
        Cell(backend="fsdp", world_size=2, micro_batch_size=1, bf16=True),
        Cell(backend="fsdp", world_size=2, micro_batch_size=1, bf16=True, keeps_masters=True),
        Cell(
            backend="fsdp",
            world_size=2,
            micro_batch_size=2,
            bf16=True,
            keeps_masters=True,
            offloads=True,
        ),
    )
    if is_available(cell)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, str]:
    """Folder of a model, and the float32 reference."""

    folder = tmp_path_factory.mktemp("bf16")
    tiny_model(
        vocab_size=203, num_attention_heads=4, tie_word_embeddings=True, **SPECIAL
    ).save_pretrained(folder / "model")
    write_reference(str(folder / "model"), "actor", folder / "reference")
    return str(folder / "model"), str(folder / "reference")


def bounds_of(cell: Cell) -> Deviations:
    return BF16_BOUNDS if cell.bf16 else FP32_BOUNDS


def violations(cells: list[Cell], model: tuple[str, str], *, seconds: float) -> list[str]:
    found = []
    for world in sorted({cell.world_size for cell in cells}):
        chosen = [cell for cell in cells if cell.world_size == world]
        work = [(cell, *model) for cell in chosen]
        ranks = run_multiprocess(measure_cells, world, timeout_seconds=seconds, args=(work,))
        assert all(rank == ranks[0] for rank in ranks)
        found += list(zip(chosen, ranks[0], strict=True))
    print(*(f"{cell}: {deviations}" for cell, deviations in found), sep="\n")
    # In bfloat16 it was computed, where that was asked for.
    assert all(("gradient" in d.above(FP32_BOUNDS)) == cell.bf16 for cell, d in found)
    return [
        f"{cell}: " + ", ".join(f"{name}={d.value(name):.3g}" for name in above)
        for cell, d in found
        if (above := d.above(bounds_of(cell)))
    ]


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_handful_of_ways_in_bfloat16_gives_the_step(model):
    assert not violations(HANDFUL, model, seconds=280)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
def test_every_strategy_dtype_offload_and_accumulation_gives_the_step(model):
    cells = product()
    assert len({(c.backend, c.bf16, c.offloads, c.keeps_masters) for c in cells}) >= 12
    assert not violations(cells, model, seconds=3500)


def test_the_doctors_bounds_are_thrice_the_plainest_way():
    bounds = bf16_bounds(BF16_BOUNDS)
    assert bounds.gradient == pytest.approx(3 * BF16_BOUNDS.gradient)
    nothing = Deviations(**dict.fromkeys(Deviations.__dataclass_fields__, 0.0))
    assert bf16_bounds(nothing) == FP32_BOUNDS
    cells = doctor_cells(2, has_deepspeed=True, bf16=True)
    assert cells[0] == Cell(bf16=True, micro_batch_size=REFERENCE.micro_batch_size)
    assert all(cell.bf16 for cell in cells)
    assert any(cell.keeps_masters for cell in cells)
    assert {cell.backend for cell in cells if cell.offloads} == {"fsdp", "zero2"}
