"""`lightrft init-model`: a random model, tiny or of a published shape, to try things out."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser
from lightrft.config.options import did_you_mean
from lightrft.tools.commands import parser_of
from lightrft.tools.plan.sizes import SHAPES

TEXT_PRESETS = ("tiny-qwen3", "tiny-llama")
MEDIA_PRESETS = ("tiny-qwen2.5-vl", "tiny-qwen2-audio")
PRESETS = (*TEXT_PRESETS, *MEDIA_PRESETS)


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft init-model --help`.

    Raises:
        UsageError: Unknown preset or shape, lengths that it cannot have, or the directory is not
            empty.
    """
    options = build_parser().parse_args(argv)
    directory, preset = Path(options.directory), options.preset
    if options.shape is not None:
        return _write_shape(directory, options)
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}{did_you_mean(preset, PRESETS)}")
    if options.lengths is not None and preset not in TEXT_PRESETS:
        raise UsageError(f"--lengths goes with a --shape or a preset of text: got {preset}")
    require_empty(directory)
    make_folder(directory)

    hide_progress_bars()
    if preset in MEDIA_PRESETS:
        from lightrft.tools.tiny_media_models import write_tiny_media_model

        write_tiny_media_model(directory, preset, options.seed)
    else:
        from lightrft.tools.model_presets import write_tiny_model

        write_tiny_model(directory, preset, options.seed, options.lengths)
    print(f"wrote {preset} with seed {options.seed} to {directory}")
    return ExitCode.OK


def _write_shape(directory: Path, options: argparse.Namespace) -> int:
    shape, lengths = options.shape, options.lengths
    if options.preset != PRESETS[0]:
        raise UsageError("--shape and --preset are two kinds of models: give one of them")
    if shape not in SHAPES:
        raise UsageError(f"--shape: no shape {shape!r}{did_you_mean(shape, SHAPES)}")
    if lengths is not None and lengths > SHAPES[shape].vocab:
        raise UsageError(
            f"--lengths: the mean of {shape} is at most its vocabulary: got {lengths}, expected at "
            f"most {SHAPES[shape].vocab}"
        )
    require_empty(directory)
    make_folder(directory)
    from lightrft.tools.model_presets import write_shape

    write_shape(directory, SHAPES[shape], seed=options.seed, lengths=lengths)
    print(
        f"wrote {shape} with {SHAPES[shape].parameters:,} random weights in bfloat16 and seed "
        f"{options.seed} to {directory}"
    )
    return ExitCode.OK


def require_empty(directory: Path) -> None:
    """Refuse to write into a file or a directory that holds something.

    Raises:
        UsageError: The file or directory holds something; the message names it.
    """
    if directory.is_file():
        raise UsageError(f"{directory} is a file: expected a new or empty directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: choose another directory or remove it first")


def make_folder(directory: Path) -> None:
    """Make a folder, and those above it.

    Raises:
        UsageError: The path cannot be a folder; the message names it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, ValueError) as err:
        raise UsageError(
            f"{directory} cannot be a folder ({err}): choose another directory"
        ) from err


def build_parser() -> Parser:
    """Return the parser of `lightrft init-model`."""
    return parser_of("init-model", presets=", ".join(PRESETS), shapes=", ".join(SHAPES))
