"""`lightrft doctor`: whether this machine can train, and whether training a model is exact."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightrft.cli.errors import ExitCode, UsageError, refuse
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.cli.preflight import model_problems
from lightrft.config.options import ConfigError, options_of
from lightrft.config.strategy_config import StrategyConfig
from lightrft.tools.commands import parser_of
from lightrft.tools.invariance.cells import Deviations

if TYPE_CHECKING:
    from lightrft.tools.invariance.measure import CellResult

COLUMNS = ("loss", "outputs", "gradient", "gradient_tensor", "weights", "update")
LEGEND = """\
Differences from one process with one padded micro-batch: of the loss; of a logprob; of the
gradient, of its worst tensor, of the weights after a step of SGD and of their change by two steps
of AdamW, in norms."""


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft doctor --help`.

    Raises:
        UsageError: Options that do not go together.
        ModelLoadError: The checkpoint cannot be read.
    """
    options = build_parser().parse_args(argv)
    check_options(options)
    hide_progress_bars()
    if options.invariance:
        return examine_model(options)
    if options.compile_backend is not None:
        return examine_compiler(options)
    if options.pretrain is not None:
        return examine_statements(options.pretrain)
    return examine_machine(gpu=options.gpu)


def check_options(options: Namespace) -> None:
    """Raise a UsageError for an option that would have no effect."""
    names = ("compile_backend", "gpu", "invariance")
    examinations = [f"--{name}" for name in names if vars(options)[name]]
    if len(examinations) > 1:
        raise UsageError(f"{' and '.join(examinations)}: each is an examination of its own")
    if examinations and options.gpu != (options.pretrain is None):
        what = "looks at no model: leave --pretrain out" if options.gpu else "needs --pretrain"
        raise UsageError(f"{examinations[0]} {what}")
    if options.bf16 and not options.invariance:
        raise UsageError("lightrft doctor: --bf16 acts only with --invariance")


def examine_statements(path: str) -> int:
    """Print what the files of a model say of it, and how contradictions are decided.

    Raises:
        ConfigError: Files are missing or cut, or there is a contradiction without a rule.
        ModelLoadError: The files cannot be read.
    """
    from lightrft.models.statements import read_statements

    refuse(model_problems("--pretrain", path), ConfigError)
    statements = read_statements(path)
    statements.say(lambda text: print(text, flush=True))
    statements.require_consistent()
    ends = statements.named(statements.vocabulary.ends) or "no token"
    print(f"{path}: {statements.vocab_size} tokens, turns end at {ends}")
    return ExitCode.OK


def examine_machine(*, gpu: bool) -> int:
    """Check this machine, or time its GPU; return 3 if something is beyond its limit.

    With `gpu`, also return 3 if nothing could be timed: no verdict is not a good one.
    """
    from lightrft.tools.doctor.check import Verdict, report

    if gpu:
        from lightrft.tools.doctor.gpu_checks import gpu_checks as checks
    else:
        from lightrft.tools.doctor.machine_checks import machine_checks as checks
    verdicts = report(checks(), lambda text: print(text, flush=True))
    is_bad = Verdict.BAD in verdicts or (gpu and Verdict.OK not in verdicts)
    return ExitCode.PREFLIGHT if is_bad else ExitCode.OK


def examine_compiler(options: Namespace) -> int:
    """Time a step of the model with and without a compiler; return 8 if it differs or fails.

    Raises:
        ConfigError: The model cannot be tried.
    """
    from lightrft.tools.invariance.compiled import try_compiling

    backend, seconds = options.compile_backend, 60 * options.timeout_minutes
    verdict = try_compiling(options.pretrain, backend, timeout_seconds=seconds)
    print(f"{'BAD' if verdict.problem else 'ok':4}compile_backend {backend}: {verdict}", flush=True)
    return ExitCode.VERIFICATION if verdict.problem else ExitCode.OK


def examine_model(options: Namespace) -> int:
    """Run one step of the model in many ways; return 8 if they differ."""
    from lightrft.tools.invariance.measure import examine

    processes = options.nproc_per_node or default_processes()
    results = []
    print(f"{LEGEND}\n\n{header()}", flush=True)
    for result in examine(
        options.pretrain,
        num_processes=processes,
        timeout_seconds=60 * options.timeout_minutes,
        bf16=options.bf16,
    ):
        results.append(result)
        print(row(*result, bounds_of(results)), flush=True)
    return conclude(results)


def bounds_of(results: Sequence[CellResult]) -> Deviations:
    """Return the bounds that follow from the rounding of the first, plainest way."""
    from lightrft.tools.invariance.cells import FP32_BOUNDS, rounding_bounds

    cell, deviations = results[0]
    # In float32 a plain way beyond the bounds is wrong, not rounded.
    if isinstance(deviations, str) or (not cell.bf16 and deviations.above(FP32_BOUNDS)):
        return FP32_BOUNDS
    return rounding_bounds(deviations)


def build_parser() -> Parser:
    """Return the parser of `lightrft doctor`."""
    backends = options_of(StrategyConfig)["compile_backend"][1].choices
    return parser_of("doctor", {"--compile_backend": backends or ()})


def default_processes() -> int:
    """Return two, unless there is only one GPU."""
    import torch

    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def header() -> str:
    """Return the first line of the table."""
    return f"{'':4}" + "".join(f"{name:>16}" for name in COLUMNS) + "  way"


def row(cell: object, deviations: Deviations | str, bounds: Deviations) -> str:
    """Return one line of the table."""
    if isinstance(deviations, str):
        return f"{'--':4}{cell}: {deviations}"
    above = deviations.above(bounds)
    numbers = [f"{deviations.value(name):.1e}{'!' if name in above else ' '}" for name in COLUMNS]
    return f"{'BAD' if above else 'ok':4}" + "".join(f"{n:>16}" for n in numbers) + f"  {cell}"


def conclude(results: Sequence[CellResult]) -> int:
    """Print bounds and verdict; return the exit code."""
    bounds = bounds_of(results)
    measured = [deviations for _, deviations in results if not isinstance(deviations, str)]
    num_bad = sum(bool(deviations.above(bounds)) for deviations in measured)
    shown = "".join(f"{bounds.value(name):.1e} ".rjust(16) for name in COLUMNS)
    print(f"{'max':4}{shown}  bounds")
    skipped = len(results) - len(measured)
    refused = f"; {skipped} not possible with this model" if skipped else ""
    print(f"{len(measured) - num_bad} of {len(measured)} ways give the same step{refused}")
    return ExitCode.VERIFICATION if num_bad else ExitCode.OK
