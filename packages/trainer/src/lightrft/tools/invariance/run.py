"""Starts the processes in which a model is examined, and collects what they found."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightrft.models import load_config
from lightrft.strategy.testing import run_multiprocess
from lightrft.tools.invariance.cells import Cell, Deviations, doctor_cells
from lightrft.tools.invariance.measure import measure_cells, write_reference

# A cell with its deviations, or with the reason why this model cannot be laid out so.
CellResult = tuple[Cell, Deviations | str]


def examine(
    path: str, *, num_processes: int, timeout_seconds: float, bf16: bool = False
) -> Iterator[CellResult]:
    """Carries out one step of a model in many ways, and compares each with the plainest.

    Args:
        path: Checkpoint of a causal language model.
        num_processes: Processes of the distributed ways; 1 leaves them out.
        timeout_seconds: Deadline of the ways with one number of processes.
        bf16: Carry them out in bfloat16; the comparison stays with float32.

    Yields:
        The results, as soon as all with one number of processes are there.

    Raises:
        ModelLoadError: The checkpoint cannot be read.
        RankFailure: A process failed.
    """
    load_config(path)
    has_deepspeed = find_spec("deepspeed") is not None
    cells = doctor_cells(num_processes, has_deepspeed=has_deepspeed, bf16=bf16)
    with tempfile.TemporaryDirectory() as folder:
        reference = str(Path(folder) / "reference.safetensors")
        for world_size in sorted({cell.world_size for cell in cells}):
            chosen = [cell for cell in cells if cell.world_size == world_size]
            results = run_multiprocess(
                examine_cells,
                world_size,
                timeout_seconds=timeout_seconds,
                args=(chosen, path, reference),
            )
            yield from zip(chosen, results[0], strict=True)  # type: ignore[call-overload]


def examine_cells(
    rank: int, world_size: int, cells: list[Cell], path: str, reference: str
) -> list[Deviations | str]:
    """Measures cells on one rank; the first rank writes the reference if there is none."""
    if not Path(reference).exists():
        write_reference(path, "actor", Path(reference))
    return measure_cells(rank, world_size, [(cell, path, reference) for cell in cells])
