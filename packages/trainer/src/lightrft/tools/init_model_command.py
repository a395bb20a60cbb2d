"""`lightrft init-model`: a tiny random model, to try things out, or a model from a GGUF file."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightrft.cli.errors import ExitCode, PreflightError, UsageError
from lightrft.cli.launch import hide_progress_bars
from lightrft.cli.options import Parser, add_number
from lightrft.config.options import did_you_mean

TEXT_PRESETS = ("tiny-qwen3", "tiny-llama")
VISION_PRESETS = (
    "tiny-qwen2-vl",
    "tiny-qwen2.5-vl",
    "tiny-qwen3-vl",
    "tiny-internvl",
    "tiny-gemma3",
    "tiny-llava",
    "tiny-llava-onevision",
    "tiny-smolvlm",
    "tiny-mllama",
)
PRESETS = (*TEXT_PRESETS, *VISION_PRESETS)


def run(argv: Sequence[str]) -> int:
    """Run the command; see `lightrft init-model --help`.

    Raises:
        UsageError: Unknown preset, or the directory is not empty.
        PreflightError: The package `gguf` is missing.
    """
    options = build_parser().parse_args(argv)
    directory, preset = Path(options.directory), options.preset or PRESETS[0]
    if options.from_gguf is not None:
        if options.preset is not None or options.seed:
            raise UsageError("--preset and --seed are for random models: leave out --from_gguf")
        return convert(Path(options.from_gguf), directory)
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}{did_you_mean(preset, PRESETS)}")
    require_empty(directory)

    hide_progress_bars()
    if preset in VISION_PRESETS:
        from lightrft.tools.tiny_vision_models import write_tiny_vision_model

        write_tiny_vision_model(directory, preset, options.seed)
    else:
        from lightrft.tools.model_presets import write_tiny_model

        write_tiny_model(directory, preset, options.seed)
    print(f"wrote {preset} with seed {options.seed} to {directory}")
    return ExitCode.OK


def convert(file: Path, directory: Path) -> int:
    """Write the model of a GGUF file."""
    if find_spec("gguf") is None:
        raise PreflightError(
            "--from_gguf needs the package gguf, which is not installed: "
            "pip install 'lightrft-trainer[smollm2]'"
        )
    require_empty(directory)
    hide_progress_bars()
    from lightrft.tools.gguf_file import write_model_from_gguf

    config = write_model_from_gguf(file, directory)
    print(f"wrote the {config.model_type} model of {file} to {directory}, dequantised to float32")
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


def build_parser() -> Parser:
    """The parser of `lightrft init-model`."""
    parser = Parser(
        "init-model",
        "Write a Hugging Face checkpoint of a tiny model with random weights, "
        "a byte-level tokenizer and a chat template, or of the model in a GGUF file.",
    )
    parser.add_argument("directory", metavar="DIR", help="Where to write it: new or empty.")
    parser.add_argument("--preset", help=f"{' or '.join(PRESETS)}. Default: {PRESETS[0]}.")
    parser.add_argument(
        "--from_gguf",
        metavar="FILE",
        help="Write the model of this GGUF file (weights dequantised to float32, tokenizer, chat "
        "template, generation settings) instead of a preset; needs the package gguf.",
    )
    add_number(parser, "--seed", "Fixes the weights.", default=0, lowest=0)
    return parser
