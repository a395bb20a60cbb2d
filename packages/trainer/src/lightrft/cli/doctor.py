"""`lightrft doctor`: whether training a given model is exact, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightrft.cli.console import hide_progress_bars
from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.options import Parser, add_number
from lightrft.trainer.invariance.cells import Deviations

if TYPE_CHECKING:
    from lightrft.trainer.invariance.run import CellResult

COLUMNS = ("loss", "outputs", "gradient", "gradient_tensor", "weights", "update")
LEGEND = """\
Differences from one process with one padded micro-batch: of the loss; of a logprob; of the
gradient, of its worst tensor, of the weights after a step of SGD and of their change by two steps
of AdamW, in norms."""


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft doctor --help`.

    Raises:
        UsageError: Nothing to examine was named.
        ModelLoadError: The checkpoint cannot be read.
    """
    options = build_parser().parse_args(argv)
    if not options.invariance:
        raise UsageError("lightrft doctor needs --invariance: it names what to examine")
    from lightrft.trainer.invariance.run import examine

    hide_progress_bars()
    processes = options.nproc_per_node or default_processes()
    results = []
    print(f"{LEGEND}\n\n{header()}", flush=True)
    for result in examine(
        options.pretrain, num_processes=processes, timeout_seconds=60 * options.timeout_minutes
    ):
        print(row(*result), flush=True)
        results.append(result)
    return conclude(results)


def build_parser() -> Parser:
    """The parser of `lightrft doctor`."""
    parser = Parser(
        "doctor",
        "Carry out one training step of a model in many ways - micro-batches, packed "
        "samples, divided sequences, recomputed activations, FSDP2, ZeRO - and compare losses, "
        "gradients and weights in float32. Exit code 8 if any of them differs.",
    )
    parser.add_argument("--invariance", action="store_true", help="Compare the ways of a step.")
    parser.add_argument(
        "--pretrain", required=True, metavar="PATH", help="Checkpoint of a causal language model."
    )
    parser.add_argument(
        "--nproc_per_node",
        type=int,
        choices=(1, 2, 4, 8),
        help="Processes. Default: 2 on a CPU; one per GPU, at most 2.",
    )
    add_number(parser, "--timeout_minutes", "Deadline.", default=30)
    return parser


def default_processes() -> int:
    """Two, unless there is one GPU only."""
    import torch

    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def header() -> str:
    """The first line of the table."""
    return f"{'':4}" + "".join(f"{name:>16}" for name in COLUMNS) + "  way"


def row(cell: object, found: Deviations | str) -> str:
    """One line of the table."""
    if isinstance(found, str):
        return f"{'--':4}{cell}: {found}"
    from lightrft.trainer.invariance.cells import FP32_BOUNDS

    above = found.above(FP32_BOUNDS)
    numbers = [f"{found.value(name):.1e}{'!' if name in above else ' '}" for name in COLUMNS]
    return f"{'BAD' if above else 'ok':4}" + "".join(f"{n:>16}" for n in numbers) + f"  {cell}"


def conclude(results: Sequence[CellResult]) -> int:
    """Prints bounds and verdict; returns the exit code."""
    from lightrft.trainer.invariance.cells import FP32_BOUNDS

    measured = [found for _, found in results if not isinstance(found, str)]
    num_bad = sum(bool(found.above(FP32_BOUNDS)) for found in measured)
    bounds = "".join(f"{FP32_BOUNDS.value(name):.1e} ".rjust(16) for name in COLUMNS)
    print(f"{'max':4}{bounds}  bounds")
    skipped = len(results) - len(measured)
    refused = f"; {skipped} not possible with this model" if skipped else ""
    print(f"{len(measured) - num_bad} of {len(measured)} ways give the same step{refused}")
    return ExitCode.VERIFICATION if num_bad else ExitCode.OK
