"""`lightrft init-model`: a tiny random model, to try things out."""

from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.errors import ExitCode, UsageError
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser, add_number
from lightrft.config.options import did_you_mean

TEXT_PRESETS = ("tiny-qwen3", "tiny-llama")
VISION_PRESETS = ("tiny-qwen2.5-vl",)
AUDIO_PRESETS = ("tiny-qwen2-audio",)
PRESETS = (*TEXT_PRESETS, *VISION_PRESETS, *AUDIO_PRESETS)


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft init-model --help`.

    Raises:
        UsageError: Unknown preset, or the directory is not empty.
    """
    options = build_parser().parse_args(argv)
    directory, preset = Path(options.directory), options.preset
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}{did_you_mean(preset, PRESETS)}")
    require_empty(directory)
    make_folder(directory)

    hide_progress_bars()
    if preset in VISION_PRESETS:
        from lightrft.tools.tiny_vision_models import write_tiny_vision_model

        write_tiny_vision_model(directory, options.seed)
    elif preset in AUDIO_PRESETS:
        from lightrft.tools.tiny_audio_models import write_tiny_audio_model

        write_tiny_audio_model(directory, options.seed)
    else:
        from lightrft.tools.model_presets import write_tiny_model

        write_tiny_model(directory, preset, options.seed)
    print(f"wrote {preset} with seed {options.seed} to {directory}")
    return ExitCode.OK


def require_empty(directory: Path) -> None:
    """Refuse to write into a file or a directory that holds something.

    Raises:
        UsageError: It does; the message names the directory.
    """
    if directory.is_file():
        raise UsageError(f"{directory} is a file: expected a new or empty directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: choose another directory or remove it first")


def make_folder(directory: Path) -> None:
    """Make a folder, and those above it.

    Raises:
        UsageError: It can be none; the message names it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, ValueError) as err:
        raise UsageError(
            f"{directory} cannot be a folder ({err}): choose another directory"
        ) from err


def build_parser() -> Parser:
    """The parser of `lightrft init-model`."""
    parser = Parser(
        "init-model",
        "Write a Hugging Face checkpoint of a tiny model with random weights, "
        "a byte-level tokenizer and a chat template.",
    )
    parser.add_argument("directory", metavar="DIR", help="Where to write it: new or empty.")
    parser.add_argument(
        "--preset", default=PRESETS[0], help=f"{', '.join(PRESETS)}. Default: {PRESETS[0]}."
    )
    add_number(parser, "--seed", "Fixes the weights.", default=0, lowest=0)
    return parser
